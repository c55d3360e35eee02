"""One text: placed, read, checked; then one arm on it: answers, likelihoods, what it kept and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import kvmem
from experiments.facts import Fact, Text, place
from experiments.protocol import Protocol
from experiments.score import numbers, score
from kvmem.ask import ask_rows, nll_batch, open_tails
from kvmem.quality import lse_error, selection
from kvmem.reading import Reading, Settings
from kvmem.spec import parse
from npqwen.errors import UserError
from npqwen.model import Attend, Model, forward, prefill, unembed
from npqwen.tokenizer import no_tokenizer

TEXTS = Path(__file__).parent / "texts"
WATCHED = 64  # question tokens, spread evenly, on whose queries selection and mass are judged


@dataclass(frozen=True)
class Subject:
    """A text ready for arms: read once, its questions and the tokens for both likelihoods encoded."""

    reading: Reading
    settings: Settings
    seed: int
    facts: tuple[Fact, ...]
    questions: list[list[int]]
    known_numbers: list[str]
    copy_ids: np.ndarray
    new_ids: np.ndarray


def prepare(model: Model, protocol: Protocol, text: int, own: tuple[str, tuple[Fact, ...]] | None = None) -> Subject:
    """Text number `text` (from 1) as a protocol wants it; `own` is a user's text and facts in place of ours."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise no_tokenizer(model.folder)
    if own is None:
        placed = placed_text(protocol, text, tokenizer.encode_plain)
        content, facts = placed.text, placed.facts
    else:
        content, facts = own
    ids = np.array(tokenizer.encode(content, allow_special=False))
    new_prose = (TEXTS / f"new_{text}.txt").read_text(encoding="utf-8")
    new_ids = np.array(tokenizer.encode_plain(" " + new_prose)[: protocol.new_tokens])
    if len(new_ids) < protocol.new_tokens:
        raise UserError(f"new_{text}.txt has {len(new_ids)} tokens, the protocol scores {protocol.new_tokens}")
    middle = (len(ids) - protocol.copy_tokens) // 2
    if middle < protocol.n_sinks:
        raise UserError(f"a text of {len(ids)} tokens is too short to copy {protocol.copy_tokens} from its middle")
    settings = Settings(protocol.n_sinks, protocol.horizon, protocol.n_fit, protocol.ridge)
    return Subject(
        reading=kvmem.read(model, ids),
        settings=settings,
        seed=protocol.seed,
        facts=facts,
        questions=[tokenizer.encode_plain(fact.question) for fact in facts],
        known_numbers=numbers(content),
        copy_ids=ids[middle : middle + protocol.copy_tokens],
        new_ids=new_ids,
    )


def placed_text(protocol: Protocol, text: int, encode: Callable[[str], Sequence[int]]) -> Text:
    """Our prose number `text` with a protocol's facts in it; for more tokens than it has, the texts after it follow."""
    files = sorted(TEXTS.glob("[0-9]_*.txt"))
    files = files[text - 1 :] + files[: text - 1]
    for n_files in range(1, len(files) + 1):
        prose = "\n\n".join(file.read_text(encoding="utf-8") for file in files[:n_files])
        rng = Random(f"{protocol.seed} {text}")
        try:
            return place(prose, protocol.n_facts, protocol.n_tokens, encode, rng)
        except ValueError as error:
            too_short = error
    raise UserError(f"{protocol.name}: {protocol.n_tokens} tokens are more than all our texts: {too_short}")


def identity_gap(model: Model, subject: Subject) -> float:
    """Largest |logit difference| on one question between the `full` arm and plain attention that never heard of arms."""
    text, question = subject.reading.ids, np.array(subject.questions[0])
    cache = model.new_cache([len(text) + len(question)])
    for _ in prefill(model, cache, [text]):  # only the cache is wanted
        pass
    plain_TE = forward(model, question, cache.append([len(question)]), cache.attend)
    memory = kvmem.build("full", subject.reading, subject.seed, subject.settings)
    tails, attend_all = open_tails(model, memory, [len(question)])
    arm_TE = forward(model, question, tails.append([len(question)]), attend_all)
    return float(np.abs(unembed(model, plain_TE) - unembed(model, arm_TE)).max())


def measure(model: Model, subject: Subject, spec: str, protocol: Protocol) -> list[dict[str, Any]]:
    """All rows of one arm on one text, without the fields that say which run they belong to."""
    clock = time.perf_counter
    start = clock()
    memory = kvmem.build(spec, subject.reading, subject.seed, subject.settings)
    built = clock()
    seen: dict[int, np.ndarray] = {}
    rows = ask_rows(model, memory, subject.questions, protocol.max_new_tokens, around=partial(watch, seen))
    asked = clock()
    copy_nll, new_nll = nll_batch(model, memory, [subject.copy_ids, subject.new_ids])
    scored = clock()

    out: list[dict[str, Any]] = []
    for item, (fact, row) in enumerate(zip(subject.facts, rows, strict=True)):
        result = score(row.text, fact.number, subject.known_numbers)
        out.append({"kind": "question", "item": item, "gold": fact.number, "answer": row.text, **result})
        out[-1]["value"] = {"question": fact.question.strip()}
    out[0]["seconds"] = asked - built  # of the whole batch: it is one computation
    out.append({"kind": "copy_nll", "nll": float(copy_nll.mean()), "seconds": scored - asked})
    out.append({"kind": "new_nll", "nll": float(new_nll.mean())})
    for layer, q_HTD in seen.items():
        if (found := selection(memory, layer, q_HTD)) is not None:
            out.append({"kind": "selection", "item": layer, "value": found})
    arm, config = parse(spec), model.config
    n_records = len(subject.reading) - protocol.n_sinks
    divisor = getattr(arm, "f", None)
    out.append(
        {
            "kind": "memory",
            "seconds": built - start,
            "value": {
                "stored_bytes": memory.stored_bytes,
                "budget_bytes": memory.full_bytes // divisor if divisor else None,
                "reads_share": arm.reads(n_records, config.head_dim),
                "lse_error": [lse_error(memory, layer, q_HTD) for layer, q_HTD in seen.items()],
            },
        }
    )
    return out


def watch(seen: dict[int, np.ndarray], attend: Attend) -> Attend:
    """Attention that keeps, per layer, the queries of WATCHED tokens of the first call: the questions' own tokens."""

    def watching(layer: int, q_HTD: np.ndarray, k_KTD: np.ndarray, v_KTD: np.ndarray) -> np.ndarray:
        if layer not in seen:
            some = np.unique(np.linspace(0, q_HTD.shape[1] - 1, WATCHED).astype(int))
            seen[layer] = q_HTD[:, some]
        return attend(layer, q_HTD, k_KTD, v_KTD)

    return watching
