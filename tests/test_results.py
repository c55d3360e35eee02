"""The results that are part of the project: whole, traceable, scored as the code scores, written from their rows."""

import json

import pytest

from experiments import evidence, protocol, publish, report
from experiments.score import exact, recall

FOLDERS = [path for name in protocol.names() for path in publish.results(name)]
IDS = [f"{path.parts[-3]}-{path.name}" for path in FOLDERS]


@pytest.fixture(params=FOLDERS, ids=IDS)
def folder(request):
    return request.param


def test_result_md_is_what_the_rows_say(folder):
    (one,) = evidence.read(folder)
    assert (folder / "RESULT.md").read_text(encoding="utf-8") == report.result(one)
    assert one.model == folder.name


def test_a_result_is_whole_and_of_the_protocol_and_of_a_commit(folder):
    (one,) = evidence.read(folder)
    assert one.missing == one.changes == []
    assert one.manifest["dirty"] is False
    assert len(one.manifest["commit"]) == 40
    assert one.manifest["protocols"][one.protocol.name] == one.protocol.sha256
    assert all(row["value"] <= one.protocol.check_limit for row in one.of("check", "full"))


def test_recall_and_exact_of_every_row_follow_from_its_answer(folder):
    (one,) = evidence.read(folder)
    for arm in one.arms:
        for row in one.of("question", arm):
            assert row["recall"] is recall(row["answer"], row["gold"])
            assert row["exact"] is exact(row["answer"], row["gold"])


def test_no_row_names_a_path_of_the_machine_that_made_it(folder):
    for file in folder.iterdir():
        for word in ("/home/", "/root/", "/tmp/", f"{protocol.HOME.parents[1].as_posix()}/", "C:\\\\"):
            assert word not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in protocol.names() if publish.results(name)])
def test_the_overview_is_what_all_models_say(name):
    found = [evidence.read(path)[0] for path in publish.results(name)]
    assert (protocol.HOME / name / "RESULT.md").read_text(encoding="utf-8") == publish.overview(found)


@pytest.mark.parametrize("name", protocol.standard())
def test_the_embedded_model_is_among_the_results(name):
    manifest = json.loads((protocol.HOME / name / "results/tiny/manifest.json").read_text(encoding="utf-8"))
    assert manifest["model"] == "tiny"


def test_readmes_table_is_what_the_rows_say():
    text = (protocol.HOME.parent / "README.md").read_text(encoding="utf-8")
    assert publish.MARKS[0] + publish.in_brief() + publish.MARKS[1] in text
