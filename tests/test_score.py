import pytest

from experiments.score import numbers, outcome, recall, score, spoken
from npqwen.errors import UserError

GOLD = "4821"
TEXT = ["4821", "9550", "1207"]


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ("4821", True),
        ("It is 4821.", True),
        ("48210", False),
        ("14821", False),
        ("4,821", True),
        ("<think>The text says 4821.</think>It is 9550.", False),
    ],
)
def test_exact_wants_the_whole_number_outside_thinking(answer, exact):
    assert score(answer, GOLD, TEXT)["exact"] is exact


@pytest.mark.parametrize(
    ("answer", "hit"),
    [
        ("4821", True),
        ("9550, not 4821", True),
        ("48210", True),
        ("14821", True),
        ("4,821", False),
        ("482", False),
        ("", False),
        ("<think>4821</think>9550", False),
    ],
)
def test_recall_is_the_published_substring(answer, hit):
    assert recall(answer, GOLD) is hit


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("no digits, none", []),
        ("4821", ["4821"]),
        ("locker-4821, code B9550, 12th", ["4821", "9550", "12"]),
        ("-4821", ["4821"]),
        ("No. 4821", ["4821"]),
        ("**4821**", ["4821"]),
        ("4821.5", ["4821.5"]),
        ("4821. 5", ["4821", "5"]),
        ("4821.Question", ["4821"]),
        ("04821", ["04821"]),
        ("1,204,821", ["1204821"]),
        ("4,821.5", ["4821.5"]),
        ("4,82", ["4", "82"]),
        ("4,8210", ["4", "8210"]),
        ("4821,955", ["4821", "955"]),
        ("4821,955,120", ["4821", "955", "120"]),
        ("9550, 4821", ["9550", "4821"]),
        ("4 821", ["4", "821"]),
    ],
)
def test_numbers_are_whole_runs_of_digits(text, found):
    assert numbers(text) == found


@pytest.mark.parametrize("text", ["\uff14\uff18\uff12\uff11", "\u0664\u0668\u0662\u0661", "\u096a\u096e\u0968\u0967"])
def test_digits_of_every_script_count_by_value(text):
    assert numbers(text) == ["4821"]
    assert recall(text, GOLD)


def test_superscripts_and_number_words_are_no_numbers():
    assert numbers("x\u00b2 and four thousand") == []


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("<think>4821</think>9550", ["9550"]),
        ("<think>\n4821\n</think>\n\n9550", ["9550"]),
        ("<think>4821", []),
        ("<think>\n4821", []),
        ("4821</think>9550", ["9550"]),
        ("9550<think>4821</think>", ["9550"]),
        ("<think>a<think>4821</think>1207</think>9550", ["9550"]),
        ("<think>1</think>95<think>2</think>50", ["95", "50"]),
    ],
)
def test_thinking_is_removed_whether_or_not_it_is_closed(answer, found):
    assert numbers(spoken(answer)) == found


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("4821", "correct"),
        ("4821, not 9550", "correct"),
        ("Unknown, perhaps 4821", "correct"),
        ("9550", "misbound"),
        ("9,550 or 4821", "misbound"),
        ("2345", "fabricated"),
        ("2345 or 4821", "fabricated"),
        ("48210", "fabricated"),
        ("4821.5", "fabricated"),
        ("999", "fabricated"),
        ("I don't know, maybe 2345", "fabricated"),
        ("", "no_number"),
        (" the locker at the end of", "no_number"),
        ("42", "no_number"),
        ("3.14159", "no_number"),
        ("I don't know.", "abstained"),
        ("I don\u2019t know", "abstained"),
        ("none", "abstained"),
        ("Unknown\n\nQuestion", "abstained"),
        ("The text does not mention it", "abstained"),
        ("It cannot be\n determined", "abstained"),
        ("It can't be determined", "abstained"),
        (" I'm sorry, but I don't", "abstained"),
        ("<think>I don't know</think>the locker", "no_number"),
        ("nonetheless", "no_number"),
    ],
)
def test_outcome_is_decided_by_the_first_number(answer, expected):
    assert outcome(answer, GOLD, TEXT) == expected


def test_short_numbers_are_passed_over_unless_the_text_has_them():
    assert outcome("1. It is 4821", GOLD, TEXT) == "correct"
    assert outcome("12 or 2345", GOLD, TEXT) == "fabricated"
    assert outcome("12 or 4821", GOLD, [*TEXT, "12"]) == "misbound"
    assert outcome("12", "12", TEXT) == "correct"


def test_a_number_cut_by_the_token_limit_is_no_number():
    assert outcome("The number of the locker is 482", GOLD, TEXT) == "no_number"
    assert outcome("The number of the locker is 955", GOLD, TEXT) == "no_number"
    assert outcome("The number of the locker is 482.", GOLD, TEXT) == "fabricated"
    assert outcome("The number of the locker is 483", GOLD, TEXT) == "fabricated"
    assert outcome("It is 9550, not 482", GOLD, TEXT) == "misbound"
    assert outcome("4821", GOLD, [*TEXT, "48210"]) == "correct"


def test_the_text_numbers_may_leave_out_the_gold():
    assert outcome("4821", GOLD, ["9550"]) == "correct"
    assert outcome("4821", GOLD, []) == "correct"


@pytest.mark.parametrize("gold", ["", "4,821", " 4821", "four", "4821 9550"])
def test_a_gold_that_is_not_one_number_is_refused(gold):
    with pytest.raises(UserError, match="is not one number"):
        outcome("4821", gold, TEXT)


def test_score_holds_all_measures_of_an_answer():
    assert score("9550, not 4821", GOLD, TEXT) == {"recall": True, "exact": False, "outcome": "misbound"}
    assert score("4,821", GOLD, TEXT) == {"recall": False, "exact": True, "outcome": "correct"}


def test_exact_is_the_first_number_even_where_the_outcome_passes_over_a_small_one():
    assert score("1. It is 4821", GOLD, TEXT) == {"recall": True, "exact": False, "outcome": "correct"}


def test_a_text_that_speaks_of_think_blocks_keeps_its_numbers():
    assert numbers("Write <think>4821</think>, then 9550.") == ["4821", "9550"]
