"""A memory: what stands in for the text in every layer. Built once, never changed, shared by all questions.

    attention of a question's token = merge( sinks, exact | the arm's part | the question's own tokens, exact and causal )

The first two are here, `attend`; the third is each question's own tail (ask.py). An arm is a recipe; `build` lets it make
one *part* per layer, and all that a part does is answer queries with a state. Sinks and tails are the same in every arm,
and positions are never compacted: whatever the arm kept, the question's first token stands at position n.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from kvmem.reading import Reading, Region, Settings
from npqwen.attention import State, grouped, merge
from npqwen.errors import UserError
from npqwen.model import Model

MOST_LAYERS = 4  # built at once: k-means of a long text takes gigabytes a layer


class Part(Protocol):
    """One layer's stand-in for the records after the sinks."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that are held of the text: records, indexes, what is fitted."""

    def state(self, q_KGTD: np.ndarray) -> State:
        """Its answer to rotated queries: out (K, G, T, D), lse (K, G, T)."""


class Arm(Protocol):
    """A recipe. str(arm) is its spec and parses back to it (spec.parse)."""

    def check(self, n_records: int, head_dim: int) -> None:
        """Raises UserError if this arm cannot be built on so many records of this width."""

    def build(self, region: Region) -> Part:
        """The part of one layer."""

    def reads(self, n_records: int, head_dim: int) -> float:
        """Floats read per query, as a share of the region's n_records * 2 * head_dim."""


@dataclass(frozen=True)
class Memory:
    """Per layer: exact sinks (k, v) and the arm's part. `n_tokens` is the text's length, where questions begin."""

    arm: Arm
    reading: Reading
    settings: Settings
    parts: tuple[Part, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.reading)

    @property
    def stored_bytes(self) -> int:
        """Bytes kept of the text after the sinks, all layers: what an arm's budget limits."""
        return sum(part.stored_bytes for part in self.parts)

    @property
    def full_bytes(self) -> int:
        """Bytes of all keys and values after the sinks, all layers: what `full` keeps."""
        config = self.reading.model.config
        n_records = self.n_tokens - self.settings.n_sinks
        return config.n_layers * config.n_kv_heads * n_records * 2 * config.head_dim * 4


def build(arm: str | Arm, reading: Reading, seed: int = 0, settings: Settings | None = None) -> Memory:
    """The memory that an arm (or its spec string) makes of a reading. The same seed gives the same memory.

    Raises UserError, before anything is computed, for a spec that is unknown or impossible on this text.
    """
    from kvmem.spec import parse

    recipe = parse(arm)
    settings = settings or Settings()
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed {seed!r}: a whole number of 0 or more is needed")
    n_records = len(reading) - settings.n_sinks
    if n_records < 1:
        raise UserError(f"{len(reading)} tokens and {settings.n_sinks} sinks leave no record for {recipe}")
    recipe.check(n_records, reading.model.config.head_dim)
    regions = [Region(reading, layer, seed, settings) for layer in range(reading.model.config.n_layers)]
    # A layer to a thread, BLAS alone in each: on another number of threads BLAS sums in another order.
    one = partial(threadpool_limits, 1, user_api="blas")  # for all threads of most libraries, for its own of some
    with one(), ThreadPoolExecutor(_threads(reading.model), initializer=one) as pool:
        return Memory(recipe, reading, settings, tuple(pool.map(recipe.build, regions)))


def _threads(model: Model) -> int:
    if model.ops.name == "numpy":
        return 1
    from npqwen import threads  # imports Numba

    return min(threads.workers(), MOST_LAYERS)


def attend(memory: Memory, layer: int, q: np.ndarray) -> State:
    """What one layer sees of the text: sinks and the arm's part, merged. q (H, T, D) rotated; out (H, T, D), lse (H, T).

    Raises ValueError if q does not have the model's heads and head_dim, or there is no such layer.
    """
    model, n_sinks, q = memory.reading.model, memory.settings.n_sinks, np.asarray(q)
    H, D = model.config.n_heads, model.config.head_dim
    if q.ndim != 3 or q.shape[0] != H or q.shape[2] != D or q.dtype.kind not in "fiu":
        raise ValueError(f"attend: q is {q.dtype} of shape {q.shape}, this model needs float32 ({H}, T, {D})")
    if layer not in range(model.config.n_layers):
        raise ValueError(f"attend: no layer {layer}, this model has {model.config.n_layers}, from 0")
    q_KGTD = grouped(q.astype(np.float32, copy=False), model.config.n_kv_heads)
    sink_k, sink_v = memory.reading.k[layer][:, :n_sinks], memory.reading.v[layer][:, :n_sinks]
    sinks = model.ops.attend(q_KGTD, sink_k, sink_v, scale=model.config.scale)
    state = merge(sinks, memory.parts[layer].state(q_KGTD))
    return State(state.out.reshape(q.shape), state.lse.reshape(q.shape[:2]))
