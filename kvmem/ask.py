"""Questions to a memory: one batch, each on its own tail of exact, causal tokens, thrown away afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvmem.memory import Memory, attend
from npqwen.attention import KVCache, merge
from npqwen.errors import UserError
from npqwen.generation import Options, Row, end_ids, new_rows, run
from npqwen.model import Attend, Model, check_ids, prefill, unembed


def ask(
    model: Model, memory: Memory, questions: Sequence[str] | Sequence[Sequence[int]], max_new_tokens: int = 8
) -> list[str]:
    """Greedy answers, one per question, all in one batch over the shared memory.

    A question is text, or ids where exact tokens matter; it follows the text directly, at position n. Answers of one
    question do not depend on the others. Raises UserError for an empty question or a model other than the memory's.
    """
    if isinstance(questions, str) or not isinstance(questions, Sequence):
        raise UserError(f"questions: a list of questions is needed, not {type(questions).__name__}")
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(
            f"{model.source}: answers in text need a tokenizer, and the folder has none; ask_rows takes ids"
        )
    ids = [tokenizer.encode_plain(q) if isinstance(q, str) else q for q in questions]
    return [row.text for row in ask_rows(model, memory, ids, max_new_tokens)]


def ask_rows(
    model: Model,
    memory: Memory,
    questions: Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int = 8,
    around: Callable[[Attend], Attend] | None = None,
) -> list[Row]:
    """ask() on token ids: finished rows, with their ids, text and the reason they ended.

    around wraps the attention of all tokens, for who wants to see queries go by.
    """
    if not questions:
        return []
    options = Options(max_new_tokens)
    rows = new_rows(model, questions, options, seed=0)  # greedy: nothing is drawn
    tails, attend_all = open_tails(model, memory, [len(row.prompt) + max(max_new_tokens - 1, 0) for row in rows])
    attend_all = around(attend_all) if around else attend_all
    for _ in run(model, rows, options, tails, attend_all, end_ids(model, None)):
        pass
    return rows


def nll(model: Model, memory: Memory, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Teacher-forced negative log-likelihood of ids[1:] after the text, float32 (T-1,), nats per token.

    ids follow the text directly. The first has no prediction from inside the sequence and is not scored.
    """
    return nll_batch(model, memory, [ids])[0]


def nll_batch(model: Model, memory: Memory, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
    """nll() of several sequences, each after the text on a tail of its own, in one batch."""
    if not sequences:
        return []
    rows = [check_ids(model, ids) for ids in sequences]
    tails, attend_all = open_tails(model, memory, [len(row) for row in rows])
    target_T = np.concatenate([np.append(row[1:], -1) for row in rows])  # -1: a row's last token predicts nothing
    scored: list[np.ndarray] = []
    t = 0
    for hidden_TE in prefill(model, tails, rows, attend_all):
        target = target_T[t : t + len(hidden_TE)]
        t += len(hidden_TE)
        logits_TV = unembed(model, hidden_TE)
        highest = logits_TV.max(axis=1)
        total = np.log(np.exp(logits_TV - highest[:, None]).sum(axis=1)) + highest
        scored.append(total - logits_TV[np.arange(len(target)), target])
    loss_T = np.concatenate(scored)
    ends = np.cumsum([len(row) for row in rows])
    return [loss_T[end - len(row) : end - 1] for end, row in zip(ends, rows, strict=True)]


def same_model(a: Model, b: Model) -> bool:
    """Whether two opened models compute alike: one geometry, and weights in the same files."""
    files = ([path.resolve() for path in model.weights.files] for model in (a, b))
    return a is b or (a.config == b.config and next(files) == next(files))


def open_tails(model: Model, memory: Memory, capacity_B: Sequence[int]) -> tuple[KVCache, Attend]:
    """Empty tails after the text, and the attention of their tokens: the memory's state merged with their own."""
    if not same_model(model, memory.reading.model):
        raise UserError(f"the memory was read with {memory.reading.model.source}, not with {model.source}")
    longest = memory.n_tokens + max(capacity_B)
    if longest > model.config.max_position:
        raise UserError(f"text and question need {longest} positions; the model has {model.config.max_position}")
    tails = model.new_cache(capacity_B, first_position=memory.n_tokens)

    def attend_all(layer: int, q_HTD: np.ndarray, k_KTD: np.ndarray, v_KTD: np.ndarray) -> np.ndarray:
        return merge(attend(memory, layer, q_HTD), tails.state(layer, q_HTD, k_KTD, v_KTD)).out

    return tails, attend_all
