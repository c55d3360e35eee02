"""Tokens one after another: greedy or sampled, one row or a ragged batch, streamed, ended by id, text or length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from npqwen.attention import KVCache
from npqwen.errors import UserError
from npqwen.model import Attend, Model, check_ids, forward, prefill, unembed


@dataclass(frozen=True)
class Options:
    """How the next token is chosen and when a row ends. temperature 0 is greedy; top_k 0 and top_p 1 keep all."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: 0 or more is needed")
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature}: 0 (greedy) or more is needed")
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k}: 0 (all) or more is needed")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p}: above 0 and at most 1 is needed")
        if not self.repetition_penalty > 0:
            raise UserError(f"repetition_penalty {self.repetition_penalty}: above 0 is needed (1 is off)")
        if "" in self.stop:
            raise UserError("stop: an empty text would end every answer at once")


@dataclass
class Row:
    """One sequence: what it has given out so far, and why it ended.

    `finish` is None while it runs, then "eos" (`ended_by` is the id), "stop" (a stop text) or "length". `ids` and `text`
    never contain the end-of-text id or any part of a stop text: tokens that may become one are held back.
    """

    prompt: np.ndarray
    seed: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    ended_by: int | None = None


def generate(
    model: Model,
    ids: Sequence[int] | np.ndarray,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    *,
    repetition_penalty: float = 1.0,
    eos: int | Iterable[int] | None = None,
) -> Iterator[int]:
    """Yields new token ids as they are chosen; the end-of-text id itself is not among them.

    stop ends the text before any of the given strings; eos replaces the checkpoint's own end ids.
    Raises UserError before any computation for an empty prompt, unknown ids or a prompt too long for the model.
    """
    options = Options(max_new_tokens, temperature, top_k, top_p, repetition_penalty, as_stops(stop))
    rows = new_rows(model, [ids], options, seed)
    return (token for _, tokens, _ in stream(model, rows, options, eos) for token in tokens)


def generate_batch(
    model: Model,
    prompts: Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] | None = None,
    stop: str | Sequence[str] | None = None,
    *,
    repetition_penalty: float = 1.0,
    eos: int | Iterable[int] | None = None,
) -> list[Row]:
    """Finished rows, one per prompt, of any lengths. A row equals its solo run whatever its batch mates do.

    seed: one per row, or one number that every row starts from: what a row draws depends on its own seed alone.
    """
    options = Options(max_new_tokens, temperature, top_k, top_p, repetition_penalty, as_stops(stop))
    rows = new_rows(model, prompts, options, seed)
    for _ in stream(model, rows, options, eos):
        pass
    return rows


def new_rows(
    model: Model,
    prompts: Sequence[Sequence[int] | np.ndarray],
    options: Options,
    seed: int | Sequence[int] | None = None,
) -> list[Row]:
    """Rows ready to run: prompts checked against the vocabulary and the model's context, a seed for each."""
    checked = [check_ids(model, prompt) for prompt in prompts]
    for ids in checked:
        needed = len(ids) + max(options.max_new_tokens - 1, 0)  # the last token is chosen but never fed
        if needed > model.config.max_position:
            raise UserError(
                f"{len(ids)} prompt tokens and {options.max_new_tokens} new ones need {needed} positions; "
                f"the model has {model.config.max_position}"
            )
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0])
    seeds = [seed] * len(checked) if isinstance(seed, int) else list(seed)
    if len(seeds) != len(checked):
        raise UserError(f"{len(seeds)} seeds for {len(checked)} prompts; one number or one seed a prompt is needed")
    return [Row(ids, row_seed) for ids, row_seed in zip(checked, seeds, strict=True)]


def stream(
    model: Model, rows: list[Row], options: Options, eos: int | Iterable[int] | None = None
) -> Iterator[tuple[int, list[int], str]]:
    """Runs the rows to their ends over a fresh cache; yields (row number, new ids, new text) as they are given out."""
    cache = model.new_cache([len(row.prompt) + options.max_new_tokens for row in rows])
    return run(model, rows, options, cache, cache.attend, end_ids(model, eos))


def run(
    model: Model, rows: list[Row], options: Options, cache: KVCache, attend: Attend, end: frozenset[int]
) -> Iterator[tuple[int, list[int], str]]:
    """The decoding loop, over any cache and attention: prompts first, then one token a step for every unfinished row."""
    if options.max_new_tokens == 0:
        for row in rows:
            row.finish = "length"
        return
    writers = [Writer(model, row, options, end) for row in rows]
    hidden_BE = last_hidden(model, cache, [row.prompt for row in rows], attend)
    active = list(range(len(rows)))
    for step in range(options.max_new_tokens):
        logits_BV = unembed(model, hidden_BE)
        if not np.isfinite(logits_BV).all():
            raise FloatingPointError(f"step {step}: the logits hold NaN or Inf; the weights or an arm are broken")
        last = step == options.max_new_tokens - 1
        tokens = {b: writers[b].choose(logits_V) for b, logits_V in zip(active, logits_BV, strict=True)}
        for b in active:
            ids, text = writers[b].push(tokens[b], last)
            if ids or text:
                yield b, ids, text
        active = [b for b in active if rows[b].finish is None]
        if not active:
            return
        counts_B = np.bincount(active, minlength=len(rows))
        ids_T = np.array([tokens[b] for b in active])
        hidden_BE = forward(model, ids_T, cache.append(counts_B), attend)


def last_hidden(model: Model, cache: KVCache, rows: Sequence[np.ndarray], attend: Attend) -> np.ndarray:
    """The hidden state of each row's last token, (B, E): all that the next token needs."""
    last_B = np.cumsum([len(row) for row in rows]) - 1
    kept, t = [], 0
    for hidden_TE in prefill(model, cache, rows, attend):
        inside = last_B[(last_B >= t) & (last_B < t + len(hidden_TE))] - t
        kept.append(hidden_TE[inside])
        t += len(hidden_TE)
    return np.concatenate(kept)


def sample(logits_V: np.ndarray, options: Options, rng: np.random.Generator) -> int:
    """The next id. Ties go to the lowest id; top_k is applied before top_p, both after the temperature."""
    if options.temperature == 0:
        return int(np.argmax(logits_V))
    ids = np.arange(len(logits_V))
    if 0 < options.top_k < len(ids):
        kth = np.partition(logits_V, -options.top_k)[-options.top_k]
        ids = np.flatnonzero(logits_V >= kth)
    ids = ids[np.argsort(-logits_V[ids], kind="stable")][: options.top_k or None]
    weight = np.exp((logits_V[ids].astype(np.float64) - logits_V[ids[0]]) / options.temperature)
    cumulative = np.cumsum(weight / weight.sum())
    n_kept = min(int(np.searchsorted(cumulative, options.top_p)) + 1, len(ids))  # the smallest set that reaches top_p
    return int(ids[np.searchsorted(cumulative[:n_kept], rng.random() * cumulative[n_kept - 1], side="right")])


def penalise(logits_V: np.ndarray, seen: set[int], penalty: float) -> np.ndarray:
    """Logits with every id of the prompt and the answer made less likely: divided if positive, multiplied if not."""
    if penalty == 1.0:
        return logits_V
    out, ids = logits_V.copy(), np.fromiter(seen, np.int64)
    out[ids] = np.where(out[ids] > 0, out[ids] / np.float32(penalty), out[ids] * np.float32(penalty))
    return out


class Writer:
    """Chooses a row's tokens and gives them out, holding back what may still become a stop text."""

    def __init__(self, model: Model, row: Row, options: Options, end: frozenset[int]):
        if options.stop and model.tokenizer is None:
            raise UserError(f"{model.source}: stop texts need a tokenizer, and the folder has none")
        self.row, self.options, self.end = row, options, end
        self.rng = np.random.default_rng(row.seed)
        self.seen = set(row.prompt.tolist())
        self.decoder = None if model.tokenizer is None else model.tokenizer.decoder()
        self.held: list[tuple[int, int]] = []  # (id, length of the text once it was decoded)
        self.decoded = ""

    def choose(self, logits_V: np.ndarray) -> int:
        return sample(penalise(logits_V, self.seen, self.options.repetition_penalty), self.options, self.rng)

    def push(self, token: int, last: bool) -> tuple[list[int], str]:
        """Takes the chosen token; returns the ids and the text that can be given out now."""
        if token in self.end:
            self.row.finish, self.row.ended_by = "eos", token
        else:
            self.seen.add(token)
            if self.decoder is not None:
                self.decoded += self.decoder.push(token)
            self.held.append((token, len(self.decoded)))
            if last:
                self.row.finish = "length"
        if self.row.finish and self.decoder is not None:
            self.decoded += self.decoder.finish()
        cut = min(
            (at for s in self.options.stop if (at := self.decoded.find(s, len(self.row.text))) >= 0), default=None
        )
        if cut is not None:
            self.row.finish, self.row.ended_by = "stop", None
            safe = cut
        elif self.row.finish:
            safe = len(self.decoded)
        else:
            safe = len(self.decoded) - longest_overlap(self.decoded, self.options.stop)
        ids = [held for held, length in self.held if length <= safe]
        self.held = self.held[len(ids) :]
        text = self.decoded[len(self.row.text) : safe]
        self.row.ids += ids
        self.row.text += text
        return ids, text


def longest_overlap(text: str, stops: Iterable[str]) -> int:
    """Characters at the end of text that begin some stop text: they may not be shown yet."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def end_ids(model: Model, eos: int | Iterable[int] | None) -> frozenset[int]:
    """The ids that end a row: the caller's, else generation_config's, else config's, else the tokenizer's."""
    ids = model.eos_ids if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for token in ids:
        if not 0 <= token < model.config.vocab_size:
            raise UserError(f"end-of-text id {token} is outside the model's vocabulary of {model.config.vocab_size}")
    return frozenset(ids)


def as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
