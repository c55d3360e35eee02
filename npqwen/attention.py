"""Softmax attention as a state that can be merged, and the cache that plain causal attention keeps.

The one idea to take away: attention over a set of keys answers a query with a *state* (out, lse), the weighted mean of
the values and the natural log of the total weight. Two states merge exactly into the state of both sets together, so
keys can be split in any way (sinks, a text, a question's own tokens) and each part computed as it likes.

Masks are ranges. Causal order, sliding windows and the rows of a batch all mean the same: query t sees the keys
span_T2[t, 0] <= s < span_T2[t, 1]. There is no padding, so there is nothing to mask away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from npqwen.config import Config

BLOCK = 256  # queries scored at a time: bounds the score matrix to G * BLOCK * S floats


class State(NamedTuple):
    """out (..., T, D) and lse (..., T), float32. lse is the natural log of the summed weights; no keys: 0 and -inf."""

    out: np.ndarray
    lse: np.ndarray


def attend(
    q_KGTD: np.ndarray,
    k_KSD: np.ndarray,
    v_KSD: np.ndarray,
    *,
    scale: float,
    span_T2: np.ndarray | None = None,
    log_weight_KS: np.ndarray | None = None,
) -> State:
    """Softmax attention over one set of keys, as a state (out_KGTD, lse_KGT).

    lse = ln sum_s exp(scale q.k_s + log_weight_s) over the query's span (None: all S keys). A query with no keys gets
    out 0 and lse -inf, which merge() ignores. Keys outside the span are never read, so what lies there may be NaN.
    Raises ValueError if the shapes do not fit. Source: FlashAttention-2, arXiv 2307.08691, section 3.1.
    """
    check_fit(q_KGTD, k_KSD, v_KSD)
    K, G, T, D = q_KGTD.shape
    S = k_KSD.shape[1]
    if span_T2 is None:
        span_T2 = np.broadcast_to(np.array([0, S]), (T, 2))
    out_KGTD = np.zeros((K, G, T, v_KSD.shape[2]), np.float32)
    lse_KGT = np.full((K, G, T), -np.inf, np.float32)
    # A key that one query of a block sees and another does not gets weight 0 there, but 0 * NaN is NaN: with such
    # values about, every query is a block of its own.
    block = BLOCK if np.isfinite(v_KSD).all() else 1
    for t0, t1 in query_blocks(span_T2, block):
        span = span_T2[t0:t1]
        lo, hi = int(span[:, 0].min()), int(span[:, 1].max())
        if hi <= lo:
            continue
        k_KSd, v_KSd = k_KSD[:, None, lo:hi], v_KSD[:, None, lo:hi]
        scores_KGTS = q_KGTD[:, :, t0:t1] @ k_KSd.swapaxes(-1, -2) * np.float32(scale)
        if log_weight_KS is not None:
            scores_KGTS += log_weight_KS[:, None, None, lo:hi]
        s = np.arange(lo, hi)
        scores_KGTS = np.where((s >= span[:, :1]) & (s < span[:, 1:]), scores_KGTS, np.float32(-np.inf))
        top_KGT1 = scores_KGTS.max(axis=-1, keepdims=True)
        top_KGT1 = np.where(np.isneginf(top_KGT1), np.float32(0), top_KGT1)  # a row without keys: exp(-inf - 0) = 0
        weight_KGTS = np.exp(scores_KGTS - top_KGT1)
        total_KGT1 = weight_KGTS.sum(axis=-1, keepdims=True)
        empty_KGT1 = total_KGT1 == 0
        total_KGT1[empty_KGT1] = 1
        out_KGTD[:, :, t0:t1] = weight_KGTS @ v_KSd / total_KGT1
        lse_KGT[:, :, t0:t1] = np.where(empty_KGT1, np.float32(-np.inf), top_KGT1 + np.log(total_KGT1))[..., 0]
    return State(out_KGTD, lse_KGT)


def check_fit(q_KGTD: np.ndarray, k_KSD: np.ndarray, v_KSD: np.ndarray) -> None:
    K, _, _, D = q_KGTD.shape
    if k_KSD.shape[::2] != (K, D) or v_KSD.shape[:2] != k_KSD.shape[:2]:
        raise ValueError(f"attend: queries {q_KGTD.shape} do not fit keys {k_KSD.shape} and values {v_KSD.shape}")


def query_blocks(span_T2: np.ndarray, block: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Runs of at most `block` consecutive queries whose spans touch: a batch's rows never share a score matrix."""
    t0 = 0
    for t in range(1, len(span_T2) + 1):
        if t == len(span_T2) or t - t0 == block or span_T2[t, 0] >= span_T2[t - 1, 1]:
            yield t0, t
            t0 = t


def merge(a: State, b: State) -> State:
    """The state of both sets of keys together: associative, commutative, (0, -inf) its identity."""
    top = np.maximum(a.lse, b.lse)
    top = np.where(np.isneginf(top), np.float32(0), top)  # neither side has keys: -inf - -inf would be NaN
    weight_a, weight_b = np.exp(a.lse - top), np.exp(b.lse - top)
    total = weight_a + weight_b
    empty = total == 0
    total = np.where(empty, np.float32(1), total)
    out = a.out * (weight_a / total)[..., None] + b.out * (weight_b / total)[..., None]
    return State(out, np.where(empty, np.float32(-np.inf), top + np.log(total)))


def grouped(q_HTD: np.ndarray, n_kv_heads: int) -> np.ndarray:
    """Query heads beside the kv head they read, (K, G, T, D): head h goes to kv head h // G.

    Neighbouring query heads share a kv head (repeat: 0 0 1 1), they do not take turns (tile: 0 1 0 1). With as many
    groups as kv heads the wrong order has the right shape, and only the text gets worse.
    """
    H, T, D = q_HTD.shape
    return q_HTD.reshape(n_kv_heads, H // n_kv_heads, T, D)


class KVCache:
    """Rotated keys and values of B rows side by side on one key axis, allocated once.

    Row b owns the slots start_B[b] : start_B[b + 1] and has filled length_B[b] of them; its first token stands at
    position `first_position`. Use: positions = cache.append(counts_B), then forward(..., attend=cache.attend).
    """

    def __init__(
        self, config: Config, capacity_B: Sequence[int], attend: Callable[..., State], first_position: int = 0
    ):
        self.start_B = np.concatenate([[0], np.cumsum(capacity_B, dtype=np.int64)])
        self.length_B = np.zeros(len(capacity_B), np.int64)
        self.first_position = first_position
        shape = (config.n_layers, config.n_kv_heads, int(self.start_B[-1]), config.head_dim)
        self.k_LKSD, self.v_LKSD = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._config, self._attend = config, attend
        self._slot_T = np.empty(0, np.int64)

    def append(self, counts_B: Sequence[int] | np.ndarray) -> np.ndarray:
        """Makes room for counts_B[b] more tokens of each row, row after row; returns their positions, int64 (T,)."""
        counts = np.asarray(counts_B, np.int64)
        if np.any(self.length_B + counts > np.diff(self.start_B)):
            raise ValueError(f"KVCache: rows of {self.length_B} tokens have no room for {counts} more")
        row_T = np.repeat(np.arange(len(counts)), counts)
        nth_T = np.arange(len(row_T)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset_T = self.length_B[row_T] + nth_T
        self._slot_T = self.start_B[row_T] + offset_T
        self._span_T2 = np.stack([self.start_B[row_T], self._slot_T + 1], axis=1)
        self.length_B = self.length_B + counts
        return self.first_position + offset_T

    def state(self, layer: int, q_HTD: np.ndarray, k_KTD: np.ndarray, v_KTD: np.ndarray) -> State:
        """Stores the appended tokens' k and v; each query sees its own row up to and including itself, or its window."""
        span_T2, window = self._span_T2, self._config.windows[layer]
        self.k_LKSD[layer][:, self._slot_T], self.v_LKSD[layer][:, self._slot_T] = k_KTD, v_KTD
        if window is not None:
            span_T2 = np.maximum(span_T2, np.stack([span_T2[:, 1] - window, span_T2[:, 1]], axis=1))
        state = self._attend(
            grouped(q_HTD, self._config.n_kv_heads),
            self.k_LKSD[layer],
            self.v_LKSD[layer],
            scale=self._config.scale,
            span_T2=span_T2,
        )
        return State(state.out.reshape(q_HTD.shape), state.lse.reshape(q_HTD.shape[:2]))

    def attend(self, layer: int, q_HTD: np.ndarray, k_KTD: np.ndarray, v_KTD: np.ndarray) -> np.ndarray:
        """Plain causal attention, out_HTD: what forward() takes when nothing else stands in for the cache."""
        return self.state(layer, q_HTD, k_KTD, v_KTD).out
