"""What an answer states against the number that it should state: pure functions of the decoded, unstripped answer."""

import re
from collections.abc import Collection
from typing import Literal, TypedDict

from npqwen.errors import UserError

Outcome = Literal["correct", "misbound", "fabricated", "no_number", "abstained"]


class Score(TypedDict):
    recall: bool
    exact: bool
    outcome: Outcome


# "4,821" is one number, "4821,955" and "4,82" are two: a comma joins only whole groups of three.
NUMBER = re.compile(r"(?<!\d,)\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?")
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)

# Searched as whole words after "can't" became "cannot" and "n't" became " not". "none" is what a prompt may ask for;
# an apology without a number is how a chat model begins to say that it does not know before the answer is cut.
ABSTENTIONS = re.compile(
    r"\b(?:none|n/a|unknown|unclear|uncertain|sorry|unable to"
    r"|no (?:answer|data|idea|information|mention|number|record|such)"
    r"|not (?:available|certain|clear|found|given|in the text|known|listed|mentioned)"
    r"|not (?:provided|recorded|specified|stated|sure)"
    r"|(?:do|does|did) not (?:contain|give|have|include|know|mention|provide|say|specify|state)"
    r"|cannot (?:answer|be determined|determine|find|know|provide|say|tell)"
    r"|text does not)\b"
)


def spoken(answer: str) -> str:
    """The answer without its thinking, and with the digits of every script as 0 to 9.

    A block that never closes is thinking to its end; a lone </think> closes one that the prompt had opened.
    """
    return plain_digits(THINKING.sub(" ", answer).rpartition("</think>")[2])


def plain_digits(text: str) -> str:
    return re.sub(r"\d", lambda digit: str(int(digit[0])), text)


def numbers(text: str) -> list[str]:
    """The numbers of a text in reading order, thousands commas dropped. Of an answer, take numbers(spoken(answer)).

    A number is a whole run of digits, so 4821 is found neither in 48210 nor in 14821; "4821.5" is one other number.
    A sign or hyphen is not part of it ("locker-4821"); numbers in words are not read.
    """
    return [match[0].replace(",", "") for match in NUMBER.finditer(plain_digits(text))]


def recall(answer: str, gold: str) -> bool:
    """Whether the digits of gold appear in the answer outside its thinking: the published measure, a plain substring.

    It is blind to boundaries both ways: 48210 is a hit for 4821, "4,821" is none. `exact` is the strict one.
    """
    return gold in spoken(answer)


def exact(answer: str, gold: str) -> bool:
    """Whether the first number of the answer, outside its thinking, is gold. Stricter than the outcome `correct`, which
    passes over the 1 of "1. It is 4821"."""
    return numbers(spoken(answer))[:1] == [gold]


def stated(answer: str, known: Collection[str]) -> str | None:
    """The number that the answer states: its first, or None.

    Passed over, if not in `known`: numbers below three digits ("1. It is 4821"), and a number at the very end that
    begins a known one ("It is 482"): the limit of new tokens may have cut it, so it is neither right nor wrong.
    """
    text = spoken(answer)
    for match in NUMBER.finditer(text):
        number = match[0].replace(",", "")
        if number in known:
            return number
        cut = match.end() == len(text) and any(other.startswith(number) for other in known)
        if len(number.partition(".")[0]) >= 3 and not cut:
            return number
    return None


def outcome(answer: str, gold: str, text_numbers: Collection[str]) -> Outcome:
    """What became of the question, decided by the number that the answer states.

    correct: it is gold; misbound: another number of the text; fabricated: not in the text, three digits or more before
    a decimal point; without a number, abstained if it says that it does not know, else no_number.
    text_numbers is what numbers(text) gives, with or without gold. Raises UserError if gold is not a number.
    """
    if numbers(gold) != [gold]:
        raise UserError(f"gold {gold!r} is not one number in plain digits, such as '4821'")
    known = {gold, *text_numbers}
    number = stated(answer, known)
    if number is None:
        return "abstained" if abstains(answer) else "no_number"
    if number == gold:
        return "correct"
    return "misbound" if number in known else "fabricated"


def abstains(answer: str) -> bool:
    """Whether the answer says, in one of the phrases of ABSTENTIONS, that it does not know."""
    words = " ".join(spoken(answer).lower().replace("\u2019", "'").split())
    return bool(
        ABSTENTIONS.search(words.replace("can't", "cannot").replace("can not", "cannot").replace("n't", " not"))
    )


def score(answer: str, gold: str, text_numbers: Collection[str]) -> Score:
    """The measures of one answer: recall(), exact() and outcome()."""
    return Score(recall=recall(answer, gold), exact=exact(answer, gold), outcome=outcome(answer, gold, text_numbers))
