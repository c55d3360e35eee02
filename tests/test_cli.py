"""The command line as a user meets it: what it prints, where, and how it ends."""

import os
import subprocess
import sys

import pytest
import toy

import npqwen
from npqwen import profile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of bytes in a folder whose name is not ASCII."""
    folder = tmp_path_factory.mktemp("modèle")
    toy.save(toy.build(seed=4, vocab_size=260, max_position_embeddings=64), folder)
    toy.add_tokenizer(folder)
    return folder


def npqwen_command(*words, stdin="", **environment):
    command = [sys.executable, "-m", "npqwen.cli", *map(str, words)]
    env = os.environ | environment
    return subprocess.run(command, input=stdin.encode(), capture_output=True, env=env, timeout=120)


def text_of(model, prompt, n):
    return model.tokenizer.decode(npqwen.generate(model, model.tokenizer.encode(prompt), n))


def test_generate_prints_the_continuation_and_nothing_else(folder):
    want = text_of(npqwen.load(folder, kernels="numpy"), "Hi", 20)
    done = npqwen_command("generate", "--model", folder, "--kernels", "numpy", "--max-new-tokens", 20, "Hi")
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert done.stdout.decode() == want + "\n"


def test_the_prompt_may_come_from_standard_input_and_is_not_stripped(folder):
    want = text_of(npqwen.load(folder, kernels="numpy"), "Hi \n", 10)
    for words in ([], ["-"]):
        done = npqwen_command(
            "generate", *words, "--model", folder, "--kernels", "numpy", "--max-new-tokens", 10, stdin="Hi \n"
        )
        assert done.stdout.decode() == want + "\n"


def test_the_locale_changes_neither_ids_nor_output(folder):
    words = ["generate", "--model", folder, "--kernels", "numpy", "--max-new-tokens", 30, "é\u65e5\u672c"]
    plain = npqwen_command(*words, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    utf8 = npqwen_command(*words, LC_ALL="C.UTF-8", PYTHONUTF8="1")
    assert plain.returncode == utf8.returncode == 0, plain.stderr.decode(errors="replace")
    assert plain.stdout == utf8.stdout


def test_a_sampled_text_comes_with_the_seed_that_repeats_it(folder):
    words = [
        "generate",
        "--model",
        folder,
        "--kernels",
        "numpy",
        "--max-new-tokens",
        12,
        "--temperature",
        1.5,
        "--ids",
        "Hi",
    ]
    first = npqwen_command(*words)
    seed = first.stderr.decode().split()[-1]
    assert first.stderr.decode() == f"npqwen: seed {seed}\n"
    again = npqwen_command(*words, "--seed", seed)
    assert again.stdout == first.stdout
    assert again.stderr == b""


def test_a_profile_adds_up_and_changes_no_text(folder):
    words = ("generate", "--model", folder, "--max-new-tokens", 20, "Hi")
    done = npqwen_command(*words, "--profile")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == npqwen_command(*words).stdout
    lines = [line.split() for line in done.stderr.decode().splitlines()]
    assert [line[0] for line in lines] == ["stage", *profile.STAGES, "prefill:"]
    for column in (1, 3):
        shares = [float(line[column]) for line in lines[1:-1]]
        assert min(shares[5:8]) > 0  # o, mlp, logits: even of a toy they take time
        assert abs(sum(shares) - 100) < 1


def test_stats_tell_how_it_ended(folder):
    done = npqwen_command("generate", "--model", folder, "--kernels", "numpy", "--max-new-tokens", 3, "--stats", "Hi")
    assert "2 prompt tokens" in done.stderr.decode()
    assert "3 new tokens" in done.stderr.decode()
    assert "ended by length" in done.stderr.decode()


def test_info_says_what_the_checkpoint_is(folder):
    done = npqwen_command("info", "--model", folder)
    out = done.stdout.decode()
    assert done.returncode == 0
    assert "qwen3" in out
    assert "4 query heads, 2 kv heads, head_dim 8" in out
    assert "384 bytes per token" in out  # 2 x 3 layers x 2 kv heads x 8 x 4 bytes
    assert npqwen.load(folder).weights.sha256() in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "--model", "./no/such/dir", "x"], "no such folder"),
        (["generate", "--model", "FOLDER", ""], "prompt is empty"),
        (["generate", "--model", "FOLDER", "--max-new-tokens", "100", "x"], "the model has 64"),
        (["generate", "--model", "FOLDER", "--temperature", "-1", "x"], "temperature -1.0"),
        (["generate", "--model", "FOLDER", "--top-p", "2", "x"], "top_p 2.0"),
        (["chat", "--model", "FOLDER", "--message", "Hi", "--max-new-tokens", "5"], "chat template"),
        (["info", "--model", "name/with/three"], "no such folder"),
        (["convert", "FOLDER/config.json", "FOLDER/new"], "GGUF"),
        (["convert", "FOLDER/none.gguf", "FOLDER/new"], "none.gguf"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(folder, words, says):
    done = npqwen_command(*(word.replace("FOLDER", str(folder)) for word in words))
    err = done.stderr.decode()
    assert done.returncode == 2, err
    assert says in err
    assert err.startswith("npqwen: ")
    assert err.count("\n") == 1
    assert not done.stdout


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["info"], ["convert"]])
def test_help_has_examples(command):
    done = npqwen_command(*command, "--help")
    assert done.returncode == 0
    assert b"example" in done.stdout


def test_a_closed_pipe_ends_quietly(folder):
    command = [sys.executable, "-m", "npqwen.cli", "generate", "--model", str(folder), "--max-new-tokens", "20", "Hi"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
