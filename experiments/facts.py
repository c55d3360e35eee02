"""Invented facts, "name -> four-digit number", and the texts that hide them.

A name is two invented words, a word is an opening and a closing syllable ("Tadek Moluk"). Words come in two disjoint
halves: "training" is all that the embedded model ever saw, "experiment" is what the experiments ask. Both halves use
every syllable. All draws are made from the random.Random that the caller passes, so a seed fixes a text.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

OPENINGS = [c + v for c in ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z") for v in "aeiou"]
CLOSINGS = [c + v + "klmnrs"[(i + j) % 6] for i, c in enumerate("bdgklmnrstvz") for j, v in enumerate("aeiou")]
CLOSINGS += ["quin", "thor", "wick", "yel"]

TEMPLATES = (
    ("The locker of {name} carries the number {number}.", "Which number does the locker of {name} carry?"),
    ("Anyone who wants to telephone {name} must dial {number}.", "What must one dial to telephone {name}?"),
    ("In the harbour register {name} is filed under {number}.", "Under what is {name} filed in the harbour register?"),
    ("The medal that {name} won was stamped with {number}.", "With what was the medal that {name} won stamped?"),
    (
        "The winter census counted for {name} exactly {number} sheep.",
        "How many sheep did the winter census count for {name}?",
    ),
)
ENGLISH = {"Files", "Later", "Meter", "Panel", "Saves"}  # not invented after all, and met in training
QUESTION = "\n\nQuestion: {} Answer:"


@dataclass(frozen=True)
class Fact:
    """`question` follows the text as it stands, line breaks included; the answer goes on with " " and the number."""

    name: str
    number: str
    sentence: str
    question: str


@dataclass(frozen=True)
class Text:
    text: str
    facts: tuple[Fact, ...]


def words(half: str) -> list[str]:
    """All words of one half, "training" or "experiment": the two colours of a chessboard of syllables."""
    if half not in ("training", "experiment"):
        raise ValueError(f"half {half!r} is unknown (training, experiment)")
    colour = ("training", "experiment").index(half)
    made = [o + c for i, o in enumerate(OPENINGS) for j, c in enumerate(CLOSINGS) if (i + j) % 2 == colour]
    return [word for word in made if word not in ENGLISH]


def names(half: str, n: int, rng: Random, avoid: str = "") -> list[str]:
    """n two-word names of one half; no word twice, and none that occurs in `avoid` (in any case)."""
    avoid = avoid.lower()
    chosen: list[str] = []
    for word in rng.sample(words(half), len(words(half))):
        if len(chosen) == 2 * n:
            break
        if word.lower() not in avoid:
            chosen.append(word)
    if len(chosen) < 2 * n:
        raise ValueError(f"{n} names asked for, {len(chosen) // 2} can be made from the {half} words")
    return [f"{a} {b}" for a, b in zip(chosen[::2], chosen[1::2], strict=True)]


def numbers(n: int, rng: Random, avoid: str = "") -> list[str]:
    """n different numbers, 1000 to 9999; none is part of a run of digits in `avoid`."""
    taken = {run[i : i + 4] for run in re.findall(r"\d{4,}", avoid) for i in range(len(run) - 3)}
    drawn = rng.sample(range(1000, 10000), n + len(taken))
    return [str(number) for number in drawn if str(number) not in taken][:n]


def sentences(prose: str) -> list[str]:
    """The sentences of a text, line breaks in them turned to spaces; one starts at each capital after . ! or ?"""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", prose.strip()):
        found += re.split(r"(?<=[.!?])\s+(?=[\"“‘(]?[A-Z])", " ".join(paragraph.split()))
    return found


def place(prose: str, n_facts: int, n_tokens: int, encode: Callable[[str], Sequence[int]], rng: Random) -> Text:
    """A text of about n_tokens tokens: whole sentences from the start of `prose`, facts at random places among them.

    The text is as long as whole sentences allow without passing n_tokens. It never starts with a fact: no fact shall
    lie in the sinks. Sentences are joined by a space. Every number, every name and every word of a name occurs once.
    Raises ValueError if the prose is too short: nothing is ever filled up or cut without a word.
    """
    number_list = numbers(n_facts, rng, prose)
    facts = []
    for i, name in enumerate(names("experiment", n_facts, rng, prose)):
        sentence, question = TEMPLATES[i % len(TEMPLATES)]
        sentence = sentence.format(name=name, number=number_list[i])
        facts.append(Fact(name, number_list[i], sentence, QUESTION.format(question.format(name=name))))
    rng.shuffle(facts)

    pieces = sentences(prose)
    budget = n_tokens - _n_tokens((fact.sentence for fact in facts), encode)
    n_taken, used = 0, 0
    for piece in pieces:
        used += _n_tokens([piece], encode)
        if used > budget:
            break
        n_taken += 1
    else:
        if used < 0.97 * budget:
            raise ValueError(
                f"the prose has {used} tokens, {budget} are needed beside {n_facts} facts for {n_tokens} tokens"
            )
    if n_taken == 0:
        raise ValueError(f"no sentence of prose fits: {n_facts} facts leave {budget} of {n_tokens} tokens")

    after = sorted(rng.choices(range(1, n_taken + 1), k=n_facts))
    merged: list[str] = []
    for i, piece in enumerate(pieces[:n_taken], start=1):
        merged.append(piece)
        merged += [fact.sentence for fact, slot in zip(facts, after, strict=True) if slot == i]
    text = " ".join(merged)
    for fact in facts:
        for part in (fact.number, fact.name, *fact.name.split()):
            assert text.count(part) == 1, f"{part!r} occurs {text.count(part)} times"
    return Text(text, tuple(facts))


def _n_tokens(pieces: Iterable[str], encode: Callable[[str], Sequence[int]]) -> int:
    return sum(len(encode(" " + piece)) for piece in pieces)
