import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "texts"
PATHS = sorted(FOLDER.glob("*.txt"))
READ = [path for path in PATHS if re.fullmatch(r"[1-6]_[a-z_]+", path.stem)]
LONG = [path for path in PATHS if re.fullmatch(r"[7-9]_[a-z_]+", path.stem)]
NEW = [path for path in PATHS if re.fullmatch(r"new_[1-6]", path.stem)]
each_text = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def sentences(path):
    return re.split(r"(?<=[.?!])\s+", path.read_text(encoding="utf-8").strip())


def test_there_are_six_texts_and_new_prose_for_each():
    assert [path.stem[0] for path in READ] == list("123456")
    assert [path.stem for path in NEW] == [f"new_{number}" for number in range(1, 7)]
    assert [path.stem[0] for path in LONG] == list("789")
    assert len(PATHS) == 15


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_text_leaves_room_for_facts_within_two_thousand_tokens(path):
    assert 1450 <= len(path.read_text().split()) <= 1550


@pytest.mark.parametrize("path", NEW, ids=lambda path: path.stem)
def test_new_prose_is_longer_than_the_tokens_scored(path):
    assert 250 <= len(path.read_text().split()) <= 300


@each_text
def test_prose_holds_no_digit_and_nothing_but_printable_ascii(path):
    assert re.findall(rb"[^\n\x20-\x7e]|[0-9]", path.read_bytes()) == []


@each_text
def test_a_paragraph_is_one_line_and_a_blank_line_parts_two(path):
    text = path.read_bytes().decode()
    assert text.endswith("\n")
    paragraphs = text[:-1].split("\n\n")
    for paragraph in paragraphs:
        assert re.fullmatch(r"[A-Z][^\n]*[.?]", paragraph)
        assert "  " not in paragraph
        assert 40 <= len(paragraph.split()) <= 200


@each_text
def test_prose_does_not_contain_the_frame_of_a_prompt(path):
    assert not re.search(r"question:|answer:|<\|", path.read_text(), re.IGNORECASE)


def test_no_sentence_stands_twice_in_all_the_prose():
    everything = [sentence for path in PATHS for sentence in sentences(path)]
    assert len(everything) > 450
    assert len(set(everything)) == len(everything)


def test_no_eight_words_in_a_row_are_shared_between_files():
    seen: dict[tuple[str, ...], str] = {}
    for path in PATHS:
        words = re.findall(r"[a-z']+", path.read_text().lower())
        for run in zip(*(words[start:] for start in range(8)), strict=False):
            assert seen.setdefault(run, path.stem) == path.stem, " ".join(run)
