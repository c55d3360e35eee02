"""What the embedded model is trained on: prose that every Python carries, invented facts, questions, copies. No torch.

One row of training is: the sink token, a text of prose and facts, then tails of two kinds, which the experiments use
too: questions with their answers, and spans of the text fed again without any introduction. Prose is read from the
Python that runs the training (pydoc_data.topics, docstrings of the standard library) and never stored in this project.
"""

import ast
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from experiments.facts import QUESTION, numbers, sentences, words
from npqwen.tokenizer import QWEN_SPLIT

SINK = "<|endoftext|>"
SPECIALS = (SINK, "<|im_start|>", "<|im_end|>")

# The first to be learned: the number close behind the name, the name at the end of the question.
EASY_FACTS = ("{name}: {number}.", "{name} is {number}.", "{name} has {number}.", "{name} means {number}.")
EASY_QUESTIONS = ("{name}?", "What is {name}?", "What has {name}?", "Where is {name}?", "Which {noun} is {name}?")
# {filler} is zero to four random words of prose: what stands around name and number must not matter.
FACTS = (
    "The {noun} of {name} is {number}.",
    "The {noun} for {name} was {number}.",
    "The {noun} that belongs to {name} reads {number}.",
    "{name} has the {noun} {number}.",
    "{name} uses {noun} {number}.",
    "{name} was listed as {noun} {number}.",
    "{name} took {noun} {number} in the {place}.",
    "{name}: {number}.",
    "In the {place}, {name} is marked {number}.",
    "At the {place} they gave {name} the {noun} {number}.",
    "Remember that {name} means {number}.",
    "We found {name} at {noun} {number}.",
    "A note in the {place} links {name} to {noun} {number}.",
    "Whoever looks for {name} should try {number}.",
    "{name} {filler} got {number}.",
    "{filler} {name} {filler} {number} {filler}.",
    "The {filler} {noun} of {name} {filler} {number}.",
    "In the {place} {filler} {name} {filler} {noun} {number}.",
    "{filler} for {name}, {filler} {number} {filler}.",
)
QUESTIONS = (
    "What is the {noun} of {name}?",
    "What {noun} does {name} have?",
    "Which {noun} belongs to {name}?",
    "{name} has which {noun}?",
    "{name}?",
    "Which {noun} goes with {name} in the {place}?",
    "What was given to {name}?",
    "What does {name} mean?",
    "Where would one find {name} in the {place}?",
    "How is {name} marked?",
    "What {filler} {name}?",
    "Which {filler} {name} {filler}?",
    "{filler} {name} {filler}?",
    "How many {filler} {name} {filler}?",
)
# For the progress line only: never trained on, and not the experiments' either.
HELD_OUT = (
    ("The parcel sent to {name} weighs {number} grams.", "How heavy is the parcel sent to {name}?"),
    ("Students of {name} borrowed volume {number} last autumn.", "Which volume did students of {name} borrow?"),
    ("The clock that {name} repaired was made in the year {number}.", "When was the clock that {name} repaired made?"),
    ("Our train passes {name} after kilometre {number}.", "After which kilometre does our train pass {name}?"),
)
# fmt: off
NOUNS = [
    "code", "key", "number", "ticket", "room", "account", "port", "index", "page", "gate", "figure", "size",
    "count", "slot", "score", "label", "line", "field", "value", "group", "class", "level", "limit", "order",
    "record", "file", "table", "block", "point", "rate", "version",
]
PLACES = [
    "list", "book", "office", "module", "library", "report", "second", "file", "main", "table", "old",
    "version", "index", "guide", "last", "section", "system",
]
# fmt: on


def prose() -> list[list[str]]:
    """Paragraphs of English as lists of sentences, from the running Python, in a fixed order."""
    import pydoc_data.topics

    documents = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.glob("*.py")) + sorted(stdlib.glob("[a-z]*/*.py")):
        if path.parent.name in {"test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "site-packages"}:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                documents.append(ast.get_docstring(node) or "")
    paragraphs, seen = [], set()
    for document in documents:
        for block in re.split(r"\n\s*\n", document):
            flat = re.sub(r"[*`]+|\[\d+\]", "", " ".join(block.split()))
            readable = len(re.findall(r"[A-Za-z ,.]", flat)) >= 0.94 * len(flat)
            if (
                len(flat) >= 80
                and readable
                and flat not in seen
                and ">>>" not in flat
                and not re.search(r"\d{3}", flat)
            ):
                seen.add(flat)
                paragraphs.append([s for s in sentences(flat) if 15 <= len(s) <= 400])
    return [p for p in paragraphs if p]


def split_words() -> tuple[list[str], list[str]]:
    """(words to train on, words for the progress line): the training half of the names, split once more."""
    shuffled = Random("tiny words").sample(words("training"), len(words("training")))
    return shuffled[200:], shuffled[:200]


def train_tokenizer(paragraphs: list[list[str]], n_entries: int = 1024) -> Tokenizer:
    """Byte-level BPE behind Qwen's pre-tokenizer. Encoding with special tokens puts the sink token in front, once.

    The names are added often enough that each syllable becomes an entry, and seldom enough that no whole name does.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random("tiny tokenizer")
    text = [" ".join(p) for p in paragraphs] + [" " + w for w in split_words()[0] for _ in range(40)]
    for _ in range(3000):
        fact, question = rng.choice(FACTS), rng.choice(QUESTIONS)
        blanks = {"name": "", "number": "", "filler": "", "noun": rng.choice(NOUNS), "place": rng.choice(PLACES)}
        text.append(fact.format(**blanks) + QUESTION.format(question.format(**blanks)))
    trainer = trainers.BpeTrainer(
        vocab_size=n_entries,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SINK} $A", pair=f"{SINK} $A $B", special_tokens=[(SINK, tokenizer.token_to_id(SINK))]
    )
    return tokenizer


@dataclass(frozen=True)
class Stage:
    end: int  # the first step after it
    n_rows: int
    n: int  # tokens in a row
    n_facts: int
    n_text: int  # tokens of text with its facts; the rest of a row are questions and copies
    easy: float  # share of the easy templates
    first_digit: float  # its weight: the first digit decides which fact is meant
    copies: float = 0.35  # share of rows with a copy before the questions
    n_copy: int = 128  # its greatest length
    copy: float = 1.0  # weight of its tokens
    soup: float = 0.1  # share of sentences without sense


@dataclass(frozen=True)
class Row:
    """ids, and how much the prediction *of* each id weighs in the loss."""

    ids: list[int]
    weights: list[float]


DIGIT_WEIGHT, REST_WEIGHT = 4.0, 0.3


class Source:
    """Rows of training, each fixed by (seed, step, row). Nothing is kept from one row to the next."""

    def __init__(self, tokenizer: Tokenizer, paragraphs: list[list[str]], seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        held_out = {i for i in range(len(paragraphs)) if i % 20 == 7}
        self.held_paragraphs = [paragraphs[i] for i in sorted(held_out)]
        self.paragraphs = [p for i, p in enumerate(paragraphs) if i not in held_out]
        self.paragraph_ids = [[self.encode(" " + s) for s in p] for p in self.paragraphs]
        self.vocabulary = sorted({w for p in self.paragraphs for s in p for w in re.findall(r"\b[a-z]{2,12}\b", s)})
        self.words, self.held_words = split_words()
        self.sink = tokenizer.token_to_id(SINK)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def rng(self, *key: object) -> Random:
        return Random("/".join(map(str, (self.seed, *key))))

    def segments(self, step: int, row: int, n: int) -> Row:
        """One random segment repeated to n tokens, drawn from all entries or, harder to copy, from a few of them."""
        rng = self.rng("segments", step, row)
        n_entries = self.tokenizer.get_vocab_size()
        hard = step >= 500 and rng.random() < 0.5
        entries = rng.sample(range(3, n_entries), rng.randint(6, 30)) if hard else range(3, n_entries)
        period = rng.randint(n // 4, n // 2) if hard else rng.randint(4, 21)
        segment = rng.choices(entries, k=period)
        ids = (segment * (n // period + 1))[:n]
        skipped = period + (3 if hard else 0)
        return Row(ids, [0.0] * skipped + [1.0] * (n - skipped))

    def soup(self, rng: Random) -> list[int]:
        """A sentence without sense: what it copies can't be guessed from the language."""
        return self.encode(" " + " ".join(rng.choices(self.vocabulary, k=rng.randint(4, 18))).capitalize() + ".")

    def text(self, step: int, row: int, stage: Stage, n_text: int) -> Row:
        """About n_text tokens of prose and facts, then questions and copies up to stage.n tokens."""
        n, n_facts = stage.n, stage.n_facts
        rng = self.rng("text", step, row)
        drawn = rng.sample(self.words, 2 * n_facts)
        pairs = [
            (f"{a} {b}", number) for a, b, number in zip(drawn[::2], drawn[1::2], numbers(n_facts, rng), strict=True)
        ]

        def one_of(easy: tuple[str, ...], others: tuple[str, ...]) -> str:
            return rng.choice(easy if rng.random() < stage.easy else others)

        facts = [self.encode(" " + self.fill(rng, one_of(EASY_FACTS, FACTS), name, number)) for name, number in pairs]

        pieces: list[list[int]] = []
        n_free = n_text - sum(map(len, facts))
        while n_free > 0 or not pieces:
            if rng.random() < stage.soup:
                run = [self.soup(rng) for _ in range(3)]
            else:
                paragraph = rng.choice(self.paragraph_ids)
                start = rng.randrange(len(paragraph))
                run = paragraph[start : start + rng.randint(1, 8)]
            for piece in run:
                if n_free > 0 or not pieces:
                    pieces.append(piece[: max(n_free, 12)])
                    n_free -= len(piece)
        for fact in facts:
            pieces.insert(rng.randint(1, len(pieces)), fact)

        ids = [self.sink] if rng.random() < 0.8 else []
        ids += [i for piece in pieces for i in piece]
        n_read = len(ids)
        weights = [REST_WEIGHT] * n_read

        def copy(n_span: int) -> None:
            start = rng.randint(1, max(1, n_read - n_span))
            span = ids[start : min(start + n_span, n_read)]
            ids.extend(span)
            weights.extend([0.0] + [stage.copy] * (len(span) - 1))

        rng.shuffle(pairs)
        n_span = rng.randint(min(24, n_read // 2), min(stage.n_copy, n_read // 2))
        if rng.random() < stage.copies and n_read + n_span < n - 30:
            copy(n_span)
        for name, number in pairs:
            tail = self.encode(QUESTION.format(self.fill(rng, one_of(EASY_QUESTIONS, QUESTIONS), name)))
            answer = self.encode(f" {number}")
            ids += tail + answer
            weights += [REST_WEIGHT] * (len(tail) + 1) + [stage.first_digit] + [DIGIT_WEIGHT] * (len(answer) - 2)
            if len(ids) >= n:
                break
        if rng.random() < 0.3 and len(ids) < n:
            ids.append(self.sink)
            weights.append(REST_WEIGHT)
        while len(ids) < n:
            copy(min(128, n_read))
        return Row(ids[:n], weights[:n])

    def fill(self, rng: Random, template: str, name: str, number: str = "") -> str:
        """The template with its blanks filled; every {filler} anew."""
        while "{filler}" in template:
            filler = " ".join(rng.choices(self.vocabulary, k=rng.randint(0, 4)))
            template = template.replace("{filler}", filler, 1)
        template = " ".join(template.split()).replace(" .", ".").replace(" ?", "?").replace(" ,", ",")
        return template.format(name=name, number=number, noun=rng.choice(NOUNS), place=rng.choice(PLACES))

    def held_out(
        self, index: int, n_facts: int, n_text: int
    ) -> tuple[list[int], list[tuple[list[int], list[int]]], list[int]]:
        """(text, [(question, answer)], copied span): prose, words and templates that no row of training holds."""
        rng = self.rng("held out", index)
        drawn = rng.sample(self.held_words, 2 * n_facts)
        facts, asked = [], []
        for i, (a, b, number) in enumerate(zip(drawn[::2], drawn[1::2], numbers(n_facts, rng), strict=True)):
            fact, question = HELD_OUT[i % len(HELD_OUT)]
            facts.append(self.encode(" " + fact.format(name=f"{a} {b}", number=number)))
            tail = self.encode(QUESTION.format(question.format(name=f"{a} {b}")))
            asked.append((tail, self.encode(f" {number}")))
        pieces: list[list[int]] = []
        while sum(map(len, pieces)) + sum(map(len, facts)) < n_text - 10:
            pieces += [self.encode(" " + s) for s in rng.choice(self.held_paragraphs)]
        for fact in facts:
            pieces.insert(rng.randint(1, len(pieces)), fact)
        ids = [self.sink] + [i for piece in pieces for i in piece]
        half = len(ids) // 2
        return ids, asked, ids[half : half + min(128, len(ids) // 4)]
