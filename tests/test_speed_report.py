"""The bench's kept figures in the report: targets judged by their bounds, selection in a table and a chart."""

import json

import pytest

from experiments import page, speed

MACHINE = {
    "cpu": "a cpu",
    "threads": 2,
    "model": "a model",
    "versions": {"numpy": "2.4"},
    "date": "2026-01-02T03:04:05",
}


def selection_row(keys, batch, arm="sign:8", ms=2.0, dense=10.0):
    return {
        **{"what": arm, "batch": batch, "keys": keys, "ms a step": ms, "dense ms": dense, "torch ms": 12.0, "MB": 3.0},
        **{"reads share": 0.1, "limit by reads": 10.0, "times faster than dense": dense / ms, "pays from": "700"},
    }


@pytest.fixture
def folder(tmp_path):
    decode = [
        {"what": "npqwen", "ratio to npqwen": 1.0, "share of read bandwidth": 0.8},
        {"what": "transformers float32", "ratio to npqwen": 7.5},
        {"what": "transformers bfloat16", "ratio to npqwen": 3.9},
    ]
    memory = [{"what": "npqwen", "ratio to npqwen": 1.0}, {"what": "transformers float32", "ratio to npqwen": 2.0}]
    rows = [selection_row(keys, batch) for batch in (1, 20) for keys in (2048, 8192)]
    for name, results in (("a", {"decode": decode, "memory": memory}), ("b", {"selection": rows})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": MACHINE} | results), encoding="utf-8")
    return tmp_path


def test_a_target_is_met_or_missed_by_its_bound_and_never_guessed(folder):
    said = {row[0]: row[1:] for row in speed.targets_table(speed.results(folder)).rows}
    assert said["decode, one row: times faster than transformers float32"] == ("\u2265 7", "7.50", "9.38", "met")
    assert said["decode, one row: times faster than transformers bfloat16"] == ("\u2265 4", "3.90", "4.88", "missed")
    assert said["decode, one row: share of the read bandwidth"] == ("\u2265 0.85", "0.80", "\u2013", "missed")
    assert said["peak memory over that of transformers float32"] == ("\u2264 0.55", "0.50", "\u2013", "met")
    assert said["decode, one row: times faster than llama.cpp BF16"][1:] == ("not measured", "\u2013", "\u2013")


def test_a_later_run_of_a_work_replaces_an_earlier_one(folder):
    later = {
        "machine": MACHINE | {"date": "2026-02-02T00:00:00"},
        "memory": [{"what": "npqwen", "ratio to npqwen": 1.0}],
    }
    (folder / "0.json").write_text(json.dumps(later), encoding="utf-8")
    assert len(speed.results(folder)["memory"]) == 1
    assert len(speed.results(folder)["decode"]) == 3


def test_selection_stands_in_the_page_as_a_table_and_a_chart_for_each_batch(folder, monkeypatch):
    monkeypatch.setattr(speed.results, "__defaults__", (folder,))
    monkeypatch.setattr(speed.machines, "__defaults__", (folder,))
    section = page._speed()
    assert section.count("<svg") == 2
    assert "sign:8, 2,048 keys: 2.0 ms" in section
    assert "a model; a cpu, 2 threads, 2026-01-02; numpy 2.4" in section


def test_runs_over_different_keys_make_one_table_and_say_from_where_an_arm_pays(tmp_path):
    for day, row in (("01", selection_row(2048, 1, dense=1.0)), ("02", selection_row(8192, 1, dense=4.0))):
        kept = {"machine": MACHINE | {"date": f"2026-01-{day}T00:00:00"}, "selection": [row]}
        (tmp_path / f"{day}.json").write_text(json.dumps(kept), encoding="utf-8")
    rows = speed.results(tmp_path)["selection"]
    assert [(row["keys"], row["times faster than dense"]) for row in rows] == [(2048, 0.5), (8192, 2.0)]
    assert [row["pays from"] for row in rows] == ["4096", "4096"]  # halfway, in logarithms
    assert len(speed.machines(tmp_path)) == 2
    assert speed.break_even([(1024, 1.5), (2048, 3.0)]) == "below 1024"
    assert speed.break_even([(1024, 2.0), (2048, 0.9)]) == "beyond 2048"


def test_without_a_kept_run_there_is_no_section(tmp_path, monkeypatch):
    monkeypatch.setattr(speed.results, "__defaults__", (tmp_path,))
    assert page._speed() == ""
