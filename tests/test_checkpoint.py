"""A checkpoint is found, fetched once, and opened without a connection ever after; what is wrong is said in one line.

Everything that touches the hub's library runs in a process of its own: it reads its variables at import.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import Hub, Repository, serve

import npqwen
from npqwen.checkpoint import TINY, find
from npqwen.errors import UserError
from npqwen.hub import INDEX, cache_folder

OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "config.json": b'{"old": 1}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"tok": 1}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"weights" * 5000,
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed either",
}
SHARDED = {name: content for name, content in FILES.items() if name != "model.safetensors"} | {
    INDEX: json.dumps({"weight_map": {"a": "m-1-of-2.safetensors", "b": "m-2-of-2.safetensors"}}).encode(),
    "m-1-of-2.safetensors": b"first" * 1000,
    "m-2-of-2.safetensors": b"second" * 1000,
    "stray.safetensors": b"not needed",
}


@pytest.fixture
def hub():
    with serve() as hub:
        moved = FILES | {"config.json": b'{"new": 1}', "model.safetensors": b"WEIGHTS" * 5000}
        hub.repositories = {
            "Qwen/one": Repository({OLD: dict(FILES)}, {"main": OLD, "v1": OLD}),
            "Qwen/two": Repository({OLD: dict(SHARDED)}, {"main": OLD}),
            "Qwen/moved": Repository({OLD: dict(FILES), NEW: moved}, {"main": OLD}),
        }
        yield hub


# Calls find() for each (source, revision) given, prints what came of it, counts connections and refuses them if told.
SCRIPT = """
import json, os, socket, sys, warnings
calls, blocked, late = json.loads(sys.argv[1])
attempts = []
connect = socket.socket.connect

def counted(self, address):
    attempts.append(str(address))
    if blocked:
        raise OSError("no network here")
    return connect(self, address)

socket.socket.connect = counted
if late:
    import huggingface_hub
    os.environ |= late
from npqwen.checkpoint import find
from npqwen.errors import UserError

results = []
for source, revision in calls:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attempts.clear()
        try:
            found = find(source, revision)
            result = {"folder": str(found.folder), "revision": found.revision}
        except UserError as error:
            result = {"error": str(error)}
    ours = [str(w.message) for w in caught if "cached commit" in str(w.message)]
    results.append(result | {"attempts": len(attempts), "warnings": ours})
print(json.dumps({"results": results, "library": "huggingface_hub" in sys.modules}))
"""


def environment(hub: Hub | None, cache: Path, **variables: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE", "TRANSFORMERS", "XDG_CACHE"))
    }
    kept |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return kept | ({"HF_ENDPOINT": hub.url} if hub else {}) | variables


def start(env: dict[str, str], calls: list, blocked: bool = False, late: dict[str, str] | None = None):
    arguments = json.dumps([[(c, None) if isinstance(c, str) else c for c in calls], blocked, late or {}])
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def run(env: dict[str, str], *calls, **options) -> list[dict]:
    return finish(start(env, list(calls), **options))["results"]


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# Folders


def checkpoint(folder: Path, *leave_out: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if name not in leave_out:
            (folder / name).write_bytes(FILES[name])
    return folder


def test_a_folder_is_itself(tmp_path):
    found = find(str(checkpoint(tmp_path)))
    assert (found.folder, found.source, found.revision) == (tmp_path, str(tmp_path), None)


def test_tiny_is_the_folder_inside_the_package():
    assert Path(npqwen.__file__).parent / "tiny" == TINY
    if not (TINY / "config.json").exists():
        pytest.skip("a checkout without the embedded weights")
    assert find("tiny").folder == TINY


def test_a_folder_of_the_form_of_a_hub_id_is_a_folder(tmp_path, monkeypatch):
    checkpoint(tmp_path / "Qwen" / "one")
    monkeypatch.chdir(tmp_path)
    assert find("Qwen/one").folder == Path("Qwen/one")


def test_what_looks_like_a_path_is_never_asked_for_on_the_hub(tmp_path):
    sources = ["./no/such/dir", "/abs/none", "name/with/three", "../up", "~/none/x", "none", "a/", "-a/b", "a b/c"]
    result = finish(start(environment(None, tmp_path, HOME=str(tmp_path)), sources, blocked=True))
    assert result["library"] is False
    for source, call in zip(sources, result["results"], strict=True):
        assert call["attempts"] == 0
        assert "no such folder" in call["error"], source


def test_a_local_folder_needs_no_hub_library(tmp_path):
    result = finish(start(environment(None, tmp_path), [str(checkpoint(tmp_path / "m"))], blocked=True))
    assert result["library"] is False
    assert result["results"][0]["attempts"] == 0


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="a revision belongs to a hub id"):
        find(str(checkpoint(tmp_path)), "main")


@pytest.mark.parametrize(
    ("leave_out", "others", "message"),
    [
        ("config.json", [], r"no config\.json here, only model\.safetensors \(that alone cannot be loaded\)"),
        ("config.json", ["m.gguf"], r"no config\.json here, only m\.gguf and 1 more \(npqwen convert"),
        ("model.safetensors", [], r"no \*\.safetensors here$"),
        ("model.safetensors", ["pytorch_model.bin"], r"only pytorch_model\.bin \(that alone cannot be loaded\)"),
        ("model.safetensors", ["a.bin", "b.bin"], r"only a\.bin and 1 more"),
        ("model.safetensors", ["m.gguf"], r"only m\.gguf \(npqwen convert reads that format\)"),
    ],
)
def test_a_file_that_is_missing_is_named_with_what_is_there_instead(tmp_path, leave_out, others, message):
    checkpoint(tmp_path, leave_out)
    for name in others:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        find(str(tmp_path))


def test_a_gguf_file_is_pointed_to_convert(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"m\.gguf: a file; .*npqwen convert"):
        find(str(tmp_path / "m.gguf"))
    with pytest.raises(UserError, match=r"no config\.json here, only m\.gguf \(npqwen convert"):
        find(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_recognised(tmp_path, name):
    (checkpoint(tmp_path) / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=rf"{name}: a git-lfs pointer"):
        find(str(tmp_path))


def test_a_dead_link_is_an_error_with_its_target(tmp_path):
    (checkpoint(tmp_path, "model.safetensors") / "model.safetensors").symlink_to("../blobs/gone")
    with pytest.raises(UserError, match=r"model\.safetensors: a link to \.\./blobs/gone, which does not exist"):
        find(str(tmp_path))


# The cache


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/o", "HF_HOME": "/h"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "/o", "HF_HOME": "/h"}, "/o"),
        ({"HF_HOME": "~/h", "XDG_CACHE_HOME": "/x"}, "/me/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, "/me/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_library_has_it(variables, expected, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"HOME": "/me"}).items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == expected
    library = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    shown = subprocess.run([sys.executable, "-c", library], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == expected


def test_only_the_files_needed_are_fetched_and_the_commit_is_recorded(hub, tmp_path):
    env = environment(hub, tmp_path)
    one, two = run(env, "Qwen/one", "Qwen/two")
    assert one["revision"] == two["revision"] == OLD
    assert contents(one["folder"]) == {n: c for n, c in FILES.items() if n not in ("README.md", "pytorch_model.bin")}
    unneeded = ("README.md", "pytorch_model.bin", "stray.safetensors")
    assert contents(two["folder"]) == {n: c for n, c in SHARDED.items() if n not in unneeded}


def test_a_full_cache_opens_without_a_single_connection(hub, tmp_path):
    env = environment(hub, tmp_path)
    calls = ["Qwen/one", "Qwen/two", ("Qwen/one", OLD)]
    first = run(env, "Qwen/one", "Qwen/two", ("Qwen/one", "v1"))
    hub.log.clear()
    silent = finish(start(env, calls, blocked=True))
    assert silent["library"] is False
    offline = run(env | {"HF_HUB_OFFLINE": "1"}, *calls, ("Qwen/one", "v1"), ("Qwen/one", "main"), blocked=True)
    told_late = run(env, *calls, ("Qwen/one", "main"), blocked=True, late={"HF_HUB_OFFLINE": "1"})
    for call in silent["results"] + offline + told_late:
        assert call["attempts"] == 0
        assert call["revision"] == OLD
        assert call["folder"] in [f["folder"] for f in first]
    assert hub.log == []


def test_a_cache_named_after_the_import_is_used(hub, tmp_path):
    env = environment(hub, tmp_path / "one")
    [call] = run(env, "Qwen/one", late={"HF_HUB_CACHE": str(tmp_path / "two")})
    assert Path(call["folder"]).is_relative_to(tmp_path / "two")


def test_a_branch_is_followed_only_when_it_is_named(hub, tmp_path):
    env = environment(hub, tmp_path)
    run(env, "Qwen/moved")
    hub.repositories["Qwen/moved"].refs["main"] = NEW
    assert [call["revision"] for call in run(env, "Qwen/moved", ("Qwen/moved", "main"))] == [OLD, NEW]
    assert [call["revision"] for call in run(env, "Qwen/moved", ("Qwen/moved", OLD))] == [NEW, OLD]


def test_a_branch_that_moves_during_a_download_gives_one_commit_all_the_same(hub, tmp_path):
    hub.push_after["config.json"] = (hub.repositories["Qwen/moved"], NEW)
    [call] = run(environment(hub, tmp_path), "Qwen/moved")
    assert call["revision"] == OLD
    assert contents(call["folder"])["model.safetensors"] == FILES["model.safetensors"]


def test_a_cache_without_refs_or_links_works(hub, tmp_path):
    env = environment(hub, tmp_path)
    [call] = run(env, "Qwen/one")
    repository = Path(call["folder"]).parent.parent
    shutil.copytree(repository, tmp_path / "copied", symlinks=False)
    shutil.rmtree(repository)
    for unneeded in ("refs", "blobs", ".no_exist"):
        shutil.rmtree(tmp_path / "copied" / unneeded)
    (tmp_path / "copied").rename(repository)
    [again] = run(env, "Qwen/one", blocked=True)
    assert (again["revision"], again["attempts"]) == (OLD, 0)


def test_a_right_to_make_links_is_not_needed(hub, tmp_path):
    [call] = run(environment(hub, tmp_path, HF_HUB_DISABLE_SYMLINKS="1"), "Qwen/one")
    assert not any(path.is_symlink() for path in Path(call["folder"]).iterdir())
    assert contents(call["folder"])["model.safetensors"] == FILES["model.safetensors"]


def test_a_miss_offline_names_model_revision_file_cache_and_variable(hub, tmp_path):
    env = environment(hub, tmp_path)
    offline = env | {"HF_HUB_OFFLINE": "1"}
    [miss] = run(offline, ("Qwen/one", "v9"), blocked=True)
    for part in ("Qwen/one", "v9", "not in the cache", str(tmp_path / "hub"), "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        assert part in miss["error"]
    [call] = run(env, "Qwen/two")
    (Path(call["folder"]) / "m-2-of-2.safetensors").unlink()
    [half] = run(offline, "Qwen/two", blocked=True)
    assert "the cache lacks m-2-of-2.safetensors" in half["error"]
    assert half["attempts"] == 0


def test_half_a_download_is_completed(hub, tmp_path):
    env = environment(hub, tmp_path)
    [call] = run(env, "Qwen/two")
    (Path(call["folder"]) / "m-2-of-2.safetensors").resolve().unlink()  # the link stays, dead
    (Path(call["folder"]) / "tokenizer.json").unlink()
    hub.log.clear()
    [again] = run(env, "Qwen/two")
    assert contents(again["folder"])["m-2-of-2.safetensors"] == SHARDED["m-2-of-2.safetensors"]
    assert contents(again["folder"])["tokenizer.json"] == SHARDED["tokenizer.json"]
    assert not any("m-1-of-2" in path for path in hub.paths("GET"))


def test_a_model_whose_tokenizer_was_never_fetched_is_not_taken_for_whole(hub, tmp_path):
    env = environment(hub, tmp_path)
    [call] = run(env, "Qwen/one")
    (Path(call["folder"]) / "tokenizer.json").unlink()
    [again] = run(env, "Qwen/one")
    assert "tokenizer.json" in contents(again["folder"])


def test_a_model_without_tokenizer_is_asked_about_only_once(hub, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        del hub.repositories["Qwen/one"].commits[OLD][name]
    env = environment(hub, tmp_path)
    first, second = run(env, "Qwen/one", "Qwen/one")
    assert first["revision"] == second["revision"] == OLD
    assert second["attempts"] == 0


def test_vocab_and_merges_are_fetched_where_there_is_no_tokenizer_json(hub, tmp_path):
    files = hub.repositories["Qwen/one"].commits[OLD]
    del files["tokenizer.json"]
    files |= {"vocab.json": b"{}", "merges.txt": b"#"}
    [call] = run(environment(hub, tmp_path), "Qwen/one")
    assert {"vocab.json", "merges.txt"} <= contents(call["folder"]).keys()


# What goes wrong on the way


def test_a_missing_a_private_and_a_gated_model_are_told_apart_as_far_as_the_hub_does(hub, tmp_path):
    hub.repositories["Qwen/private"] = Repository({}, {}, status=401)
    hub.repositories["Qwen/gated"] = Repository({}, {}, status=403)
    env = environment(hub, tmp_path, HF_TOKEN="hf_secret")
    typo, private, gated, revision = run(
        env, "Qwen/onee", "Qwen/private", "Qwen/gated", ("Qwen/one", "v9"), blocked=False
    )
    for call in (typo, private):
        assert "no such model on the hub, or a private one (HTTP 401)" in call["error"]
        assert "HF_TOKEN" in call["error"]
        assert "no such folder here" in call["error"]
    assert "accept the licence" in gated["error"]
    assert "no revision 'v9'" in revision["error"]
    for call in (typo, private, gated, revision):
        assert "\n" not in call["error"]
        assert "hf_secret" not in call["error"]
    assert "Bearer hf_secret" in hub.tokens  # the hub alone gets to see it


def test_a_repository_that_is_no_checkpoint_says_so(hub, tmp_path):
    hub.repositories["Qwen/gguf"] = Repository({OLD: {"m.gguf": b"GGUF"}}, {"main": OLD})
    hub.repositories["Qwen/bin"] = Repository({OLD: {"config.json": b"{}", "a.bin": b""}}, {"main": OLD})
    hub.repositories["Qwen/gap"] = Repository({OLD: dict(SHARDED)}, {"main": OLD})
    del hub.repositories["Qwen/gap"].commits[OLD]["m-2-of-2.safetensors"]
    gguf, binary, gap = run(environment(hub, tmp_path), "Qwen/gguf", "Qwen/bin", "Qwen/gap")
    assert "no config.json" in gguf["error"]
    assert "no model.safetensors; only safetensors" in binary["error"]
    assert "no m-2-of-2.safetensors" in gap["error"]


def test_an_index_cannot_reach_outside_its_folder(hub, tmp_path):
    index = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    hub.repositories["Qwen/two"].commits[OLD][INDEX] = index
    [call] = run(environment(hub, tmp_path), "Qwen/two")
    assert "plain file names are needed" in call["error"]


def test_a_cut_download_resumes_where_it_stopped(hub, tmp_path):
    content = bytes(range(256)) * 100_000  # the library keeps whole pieces of 10 MiB
    hub.repositories["Qwen/one"].commits[OLD]["model.safetensors"] = content
    hub.cut_after["model.safetensors"] = [11 << 20, 12 << 20]
    [call] = run(environment(hub, tmp_path), "Qwen/one")
    assert contents(call["folder"])["model.safetensors"] == content
    ranges = [asked for method, path, asked in hub.log if method == "GET" and path.startswith("/cdn/")]
    assert ranges == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_two_processes_on_a_cold_cache_both_finish(hub, tmp_path):
    env = environment(hub, tmp_path)
    both = [start(env, ["Qwen/one", "Qwen/two"]) for _ in range(2)]
    for process in both:
        for call, files in zip(finish(process)["results"], (FILES, SHARDED), strict=True):
            assert call["revision"] == OLD
            for name, content in contents(call["folder"]).items():
                assert content == files[name]


def test_a_hub_that_fails_is_said_and_the_cache_stands_in(hub, tmp_path):
    env = environment(hub, tmp_path)
    run(env, "Qwen/one")
    hub.broken = True
    moving, absent = run(env, ("Qwen/one", "main"), "Qwen/two")
    assert moving["revision"] == OLD
    assert "HTTP 503" in moving["warnings"][0]
    assert "the hub answers HTTP 503 for config.json; revision main: not in the cache" in absent["error"]


def test_a_cache_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "hub").write_text("a file where the folder should be")
    [call] = run(environment(hub, tmp_path), "Qwen/one")
    assert f"cannot be stored in {tmp_path / 'hub'}" in call["error"]


def test_a_hub_that_cannot_be_reached_is_said_and_the_cache_stands_in(hub, tmp_path):
    env = environment(hub, tmp_path)
    run(env, "Qwen/one")
    moving, absent = run(env, ("Qwen/one", "main"), "Qwen/two", blocked=True)
    assert moving["revision"] == OLD
    assert moving["attempts"] > 0
    assert len(moving["warnings"]) == 1
    assert "Qwen/one: the connection to the hub failed at config.json" in moving["warnings"][0]
    assert f"using the cached commit {OLD}" in moving["warnings"][0]
    assert "the connection to the hub failed" in absent["error"]
    assert str(tmp_path / "hub") in absent["error"]
