"""The runner: complete rows, one run a folder, nothing lost or doubled by a kill, nothing changed by jobs."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy
from filelock import FileLock

from experiments import measure, run
from experiments.store import FIELDS

ROOT = Path(__file__).parent.parent
ARMS = ["recent/8", "ffit/8", "sign:8", "sign:8+ffit/8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of single bytes: it recalls nothing, and every part of a run is there."""
    folder = tmp_path_factory.mktemp("toy")
    toy.save(toy.build(seed=4, vocab_size=260, max_position_embeddings=4096, num_hidden_layers=2), folder)
    toy.add_tokenizer(folder)
    return folder


def command(folder, out, *more):
    return [
        sys.executable,
        "-m",
        "experiments",
        "run",
        "e2",
        "--model",
        str(folder),
        "--out",
        str(out),
        *map(str, more),
    ]


def finished(folder, out, *more):
    done = subprocess.run(command(folder, out, *more), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def rows(out):
    """All rows without their times, in an order of their own; the same key never twice."""
    found = [json.loads(line) for line in (out / "e2.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = [(row["text"], row["arm"], row["kind"], row["item"] is not None, row["item"]) for row in found]
    assert len(set(keys)) == len(keys)
    for row in found:
        assert tuple(row) == FIELDS
        row.pop("seconds")
    return [row for _, row in sorted(zip(keys, found, strict=True), key=lambda pair: str(pair[0]))]


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    done = finished(folder, out, "--texts", 2, "--arms", *ARMS)
    assert done.stdout.rstrip().endswith(str(out / "report.html"))
    return out


def test_a_run_leaves_every_row_and_a_manifest(undisturbed):
    found = rows(undisturbed)
    for text in (1, 2):
        for arm in ["full", "none", *ARMS]:
            kinds = [row["kind"] for row in found if (row["text"], row["arm"]) == (text, arm)]
            want = {"question": 20, "copy_nll": 1, "new_nll": 1, "memory": 1, "selection": 2 * ("sign" in arm)}
            want["check"] = int(arm == "full")
            assert {kind: kinds.count(kind) for kind in want} == want, arm
    assert all(row["value"] <= 2e-4 for row in found if row["kind"] == "check")
    manifest = json.loads((undisturbed / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["finished"] >= manifest["started"]
    assert manifest["weights_sha256"] == found[0]["weights_sha256"]
    assert manifest["protocols"] == {"e2": found[0]["protocol_sha256"]}
    assert {"commit", "dirty", "versions", "machine", "threads", "seeds", "texts", "arms"} <= manifest.keys()


def test_running_again_adds_nothing(folder, undisturbed):
    before = {name: (undisturbed / name).read_bytes() for name in ("e2.jsonl", "manifest.json")}
    finished(folder, undisturbed, "--texts", 2, "--arms", *ARMS)
    assert {name: (undisturbed / name).read_bytes() for name in before} == before


def test_a_resumed_run_keeps_what_the_manifest_said_of_its_first_rows(folder, tmp_path):
    finished(folder, tmp_path, "--texts", 1, "--arms", "recent/4")
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    first = manifest | {"commit": "a1", "machine": "another"}
    (tmp_path / "manifest.json").write_text(json.dumps(first), encoding="utf-8")
    finished(folder, tmp_path, "--texts", 2, "--arms", "random/4")
    then = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert (then["commit"], then["machine"], then["started"]) == ("a1", "another", manifest["started"])
    assert (then["texts"], then["arms"]["e2"]) == (2, ["full", "none", "recent/4", "random/4"])
    assert [start["commit"] for start in then["resumed"]] == [manifest["commit"]]
    assert then["finished"] >= then["resumed"][0]["started"]


def test_a_run_killed_at_any_moment_is_resumed_without_loss(folder, undisturbed, tmp_path):
    words = command(folder, tmp_path, "--texts", 2, "--arms", *ARMS)
    rng = random.Random(5)
    kills = int(os.environ.get("NPQWEN_KILLS", "3"))
    for _ in range(kills):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = lambda: (tmp_path / "e2.jsonl").stat().st_size if (tmp_path / "e2.jsonl").exists() else 0  # noqa: E731
        begun, deadline = size(), time.monotonic() + 120
        while size() == begun and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished(folder, tmp_path, "--texts", 2, "--arms", *ARMS)
    assert rows(tmp_path) == rows(undisturbed)


def test_a_line_that_a_kill_cut_is_made_again(folder, undisturbed, tmp_path):
    whole = (undisturbed / "e2.jsonl").read_bytes()
    (tmp_path / "e2.jsonl").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "manifest.json").write_bytes((undisturbed / "manifest.json").read_bytes())
    finished(folder, tmp_path, "--texts", 2, "--arms", *ARMS)
    assert rows(tmp_path) == rows(undisturbed)


def test_texts_in_parallel_processes_give_the_same_rows(folder, undisturbed, tmp_path):
    finished(folder, tmp_path, "--texts", 2, "--jobs", 2, "--arms", *ARMS)
    assert rows(tmp_path) == rows(undisturbed)


def killed(pipe):
    pipe.send({"kind": "question"})
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_ends_the_run_in_words_and_not_in_waiting():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("spawn").Process(target=killed, args=(theirs,))
    worker.start()
    theirs.close()
    got = run.gather({ours: worker})
    assert next(got) == {"kind": "question"}
    with pytest.raises(ChildProcessError, match="ended with code -9"):
        next(got)


def test_two_runs_into_one_folder_are_refused(folder, tmp_path):
    with FileLock(tmp_path / ".lock"):
        done = subprocess.run(command(folder, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "another run is writing here" in done.stderr


def test_another_model_or_seed_does_not_join_a_folder(folder, undisturbed, tmp_path):
    other = toy.save(
        toy.build(seed=5, vocab_size=260, max_position_embeddings=4096, num_hidden_layers=2), tmp_path / "b"
    )
    toy.add_tokenizer(other)
    numpy = ("--kernels", "numpy")  # its sums round otherwise
    for words in (
        command(other, undisturbed),
        command(folder, undisturbed, "--seed", 9),
        command(folder, undisturbed, *numpy),
    ):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "holds a run with" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "line", ["How many?\t4821\n", "\ufeffHow many?\t4821\r\n", "How many?\t\u0664\u0668\u0662\u0661\n"]
)
def test_a_question_file_as_editors_write_it(tmp_path, line):
    (tmp_path / "my.txt").write_text("\ufeffIts wheel has 4821 parts.", encoding="utf-8")
    (tmp_path / "my.tsv").write_bytes(line.encode())
    text, (fact,) = run.read_own(str(tmp_path / "my.txt"), str(tmp_path / "my.tsv"))
    assert text == "Its wheel has 4821 parts."
    assert (fact.number, fact.question) == ("4821", "\n\nQuestion: How many? Answer:")


def test_ones_own_text_and_questions(folder, tmp_path):
    text = "The mill by the river was built long ago. " * 12 + "Its wheel has 4821 parts. " + "It still turns. " * 12
    (tmp_path / "my.txt").write_text(text, encoding="utf-8")
    (tmp_path / "my.tsv").write_text("How many parts has the wheel?\t4821\n\n", encoding="utf-8")
    words = ["--text-file", tmp_path / "my.txt", "--question-file", tmp_path / "my.tsv", "--arms", "sign:8"]
    finished(folder, tmp_path / "out", *words)
    found = rows(tmp_path / "out")
    assert [(row["arm"], row["gold"]) for row in found if row["kind"] == "question"] == [
        (arm, "4821") for arm in sorted(["full", "none", "sign:8"])
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["e9"], "e9"),
        (["e2", "--texts", "7"], "1 to 6 texts exist"),
        (["e2", "--texts", "-1"], "1 to 6 texts exist"),
        (["e2", "--texts", "0"], "1 to 6 texts exist"),
        (["e2", "--seed", "-1"], "--seed -1"),
        (["e2", "--jobs", "0"], "1 or more"),
        (["e2", "--arms", "ffit/8", "sine:8"], "'sine:8' is unknown"),
        (["e2", "--arms", "sign:3000"], "3000 records asked for"),
        (["e2", "--model", "./nowhere"], "no such folder"),
        (["e2", "--text-file", "a.txt"], "belong together"),
        (
            ["e2", "--text-file", "none.txt", "--question-file", "none.tsv"],
            "none.txt: cannot be read as a UTF-8 text",
        ),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(folder, tmp_path, words, says):
    line = [sys.executable, "-m", "experiments", "run", "--out", str(tmp_path)]
    line += [] if "--model" in words else ["--model", str(folder)]
    done = subprocess.run([*line, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    err = [text for text in done.stderr.splitlines() if text.startswith("python -m experiments")]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(err) == 1
    assert says in err[0]


def test_a_run_stops_when_the_full_arm_is_not_plain_attention(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "identity_gap", lambda model, subject: 3e-4)
    with pytest.raises(FloatingPointError, match=r"text 1: 'full' differs from plain attention by 3.00e-04"):
        run.main(["e2", "--model", str(folder), "--out", str(tmp_path), "--texts", "1"])
    assert not (tmp_path / "e2.jsonl").exists()  # a later run that passes is not judged by this one's value
