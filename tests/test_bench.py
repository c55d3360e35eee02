"""The bench runs as its user runs it, small, on the embedded model; what it keeps is what the report can read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import publish, speed

ROOT = Path(__file__).parents[1]
KEPT = sorted(speed.SPEED.glob("*.json"))


def bench(*arguments):
    command = [sys.executable, "tools/bench.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_every_work_without_peers_gives_rows_and_a_table(tmp_path):
    file = tmp_path / "results.json"
    small = [
        "--turns",
        "1",
        "--tokens",
        "300",
        "--rows",
        "3",
        "--keys",
        "512",
        "--long-keys",
        "600",
        "--arms",
        "sign:8",
    ]
    works = ["decode", "batch", "prefill", "profile", "attention", "selection", "long", "memory", "open"]
    done = bench(*works, "--model", "npqwen/tiny", "--peers", *small, "--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert list(results) == ["machine", *works]
    assert results["machine"]["model"] == "tiny"
    for work in works:
        assert f"\n{work}\n" in done.stdout
        for row in results[work]:
            assert all(value >= 0 for value in row.values() if not isinstance(value, str))
    for phase in ("prefill", "decode"):
        assert sum(row[f"% of {phase}"] for row in results["profile"]) == pytest.approx(100)
    assert [(row["what"], row["keys"]) for row in results["long"]] == [("full", 600), ("sign:8", 600)]
    assert results["long"][0]["times faster than dense"] == 1
    one = results["selection"][0]
    assert one["times faster than dense"] == pytest.approx(one["dense ms"] / one["ms a step"])


def test_a_contender_that_fails_is_named_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = bench("decode", "--model", str(tmp_path), "--peers", "--turns", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("bench: npqwen ended with code 1 on opening: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("file", KEPT, ids=lambda path: path.stem)
def test_a_kept_run_says_where_it_was_made_and_names_no_path(file):
    text = file.read_text(encoding="utf-8")
    machine = json.loads(text)["machine"]
    assert machine["threads"] >= 1
    assert machine["versions"]["npqwen"]
    assert not any(word in text for word in ("/home/", "/root/", "/tmp/", f"{ROOT.parent.as_posix()}/", "C:\\\\"))


def test_readmes_table_is_what_the_kept_runs_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = publish.SPEED_MARKS
    assert start + publish.speed_in_brief() + end in text
