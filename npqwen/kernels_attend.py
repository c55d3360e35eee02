"""Attention over one set of keys, from one query over 64,000 keys to 2,000 causal ones, in one kernel.

Work is cut into items of (kv head, tile of tokens, chunk of keys). A worker walks the chunk in blocks of keys that stay
in its cache and meets each with all the tile's query rows, keeping a running maximum, sum and output per row
(FlashAttention-2, arXiv 2307.08691, section 3.1). Chunks of one row are states, merged at the end.
A value outside a row's span may be NaN, and 0 times NaN is NaN: rows that see different keys of a block are computed
together, with weights of 0, only if all its values are finite, else one after another, each over its own keys.
How work is cut depends on shapes alone, and items do not share sums: the number of threads changes no bit.
"""

from __future__ import annotations

import math
from functools import cache

import numba
import numpy as np
from numba import types

from npqwen import threads
from npqwen.attention import State, check_fit
from npqwen.jit import jit
from npqwen.kernels_simd import (
    DOT_ROWS,
    LANES,
    SUM_ROWS,
    SUM_VECTORS,
    TILE_K,
    WIDE_COLS,
    dot_row,
    dot_wide,
    exp_row,
    prefetch,
    sum_tile,
    take,
    transpose_tile,
)
from npqwen.scratch import scratch

TILE = 128  # query rows (tokens times heads of a group) that meet a block of keys together
BLOCK_S = 128
ITEMS = 32  # wanted at least, so that threads end together; chunks are not cut below MIN_CHUNK keys for it
MIN_CHUNK = 256
ALONE = 1 << 16  # products: below, starting the threads costs more than they save
ROWS = SUM_ROWS  # computed together
ROWS_TRANSPOSED = WIDE_COLS + 1  # from so many on, a block of keys is transposed first: no sums across lanes then
STREAMS = 2 * DOT_ROWS  # keys far apart are read at once: see kernels_linear
PAD = 16
AHEAD = 32  # rows


def attend(
    q_KGTD: np.ndarray,
    k_KSD: np.ndarray,
    v_KSD: np.ndarray,
    *,
    scale: float,
    span_T2: np.ndarray | None = None,
    log_weight_KS: np.ndarray | None = None,
) -> State:
    """Softmax attention over one set of keys, as a state (out_KGTD, lse_KGT). The twin of attention.attend.

    Keys and values may be views into a longer cache. out lies in memory token by token, as the next product reads it.
    """
    check_fit(q_KGTD, k_KSD, v_KSD)
    K, G, T, D = q_KGTD.shape
    S, D_v = k_KSD.shape[1], v_KSD.shape[2]
    if span_T2 is None:
        span_T2 = np.empty((T, 2), np.int64)
        span_T2[:] = 0, S
    tokens = max(1, TILE // G)
    n_tiles = -(-T // tokens)
    chunks = max(1, min(-(-ITEMS // max(1, K * n_tiles)), S // MIN_CHUNK))
    out_CTKGD, lse_CTKG = np.empty((chunks, T, K, G, D_v), np.float32), np.empty((chunks, T, K, G), np.float32)
    if out_CTKGD.size:
        log_weight = np.empty((0, 0), np.float32) if log_weight_KS is None else log_weight_KS
        arguments = (
            _rows(q_KGTD),
            _rows(k_KSD),
            _rows(v_KSD),
            np.float32(scale),
            np.ascontiguousarray(span_T2, np.int64),
            np.ascontiguousarray(log_weight, np.float32),
            tokens,
            out_CTKGD,
            lse_CTKG,
        )
        n = tokens * G
        step_q, step_o, step_s, step_k = _steps.py_func(D, D_v)
        per_worker = n * (step_q + step_o + 3) + step_k * BLOCK_S + ROWS * step_s + 16
        per_worker = -(-per_worker // 16) * 16  # every worker's buffer starts on a cache line
        alone, parallel = _compiled()
        with threads.lock:
            workers = threads.workers()
            buffers = scratch("attend", workers * per_worker).reshape(workers, per_worker)
            counter = np.zeros(1, np.int64)
            if workers == 1 or K * G * T * S * D < ALONE:
                alone(*arguments, buffers[0], counter)
            else:
                parallel(*arguments, buffers, counter, workers)
        if chunks > 1:
            _merge_chunks(out_CTKGD, lse_CTKG)
    return State(out_CTKGD[0].transpose(1, 2, 0, 3), lse_CTKG[0].transpose(1, 2, 0))


def _rows(x: np.ndarray) -> np.ndarray:
    """float32 with the last axis contiguous; a view of a longer cache stays one."""
    if x.dtype != np.float32 or (x.strides[-1] != 4 and x.shape[-1] > 1):
        return np.ascontiguousarray(x, np.float32)
    return x


_IN3, _IN4 = (types.Array(types.float32, n, "A", readonly=True) for n in (3, 4))
_OUT, _LSE = types.float32[:, :, :, :, ::1], types.float32[:, :, :, ::1]
_ARGUMENTS = (_IN4, _IN3, _IN3, types.float32, types.int64[:, ::1], types.float32[:, ::1], types.int64, _OUT, _LSE)


@cache
def _compiled():
    """The kernels for one set of types that arrays of all strides convert to, not one for every mixture of strides."""
    one = types.void(*_ARGUMENTS, types.float32[::1], types.int64[::1])
    many = types.void(*_ARGUMENTS, types.float32[:, ::1], types.int64[::1], types.int64)
    for kernel, signature in ((_attend, one), (_attend_parallel, many)):
        kernel.compile(signature)
        kernel.disable_compile()
    return _attend, _attend_parallel


@jit()
def _attend(q, k, v, scale, span, log_weight, tokens, out, lse, buffer, counter):
    K, G, T, D = q.shape
    S, D_v = k.shape[1], v.shape[2]
    chunks, n_tiles = len(out), (T + tokens - 1) // tokens
    step_q, step_o, step_s, step_k = _steps(D, D_v)
    n = tokens * G
    queries, buffer = buffer[: n * step_q], buffer[n * step_q :]
    out_rows, buffer = buffer[: n * step_o], buffer[n * step_o :]
    keys, buffer = buffer[: step_k * BLOCK_S], buffer[step_k * BLOCK_S :]
    scores, buffer = buffer[: ROWS * step_s], buffer[ROWS * step_s :]
    ones, top, total, keep = buffer[:16], buffer[16 : 16 + n], buffer[16 + n : 16 + 2 * n], buffer[16 + 2 * n :]
    ones[:] = 1
    while True:
        item: int = take(counter)
        if item >= K * n_tiles * chunks:
            return
        chunk, item = item % chunks, item // chunks
        head, tile = item % K, n_tiles - 1 - item // K  # late tiles first: in causal order they see the most keys
        t0, t1 = tile * tokens, min((tile + 1) * tokens, T)
        rows = (t1 - t0) * G
        lo, hi = _chunk_of_keys(span, t0, t1, S, chunk, chunks)
        for r in range(rows):
            for d in range(D):
                queries[r * step_q + d] = q[head, r % G, t0 + r // G, d] * scale
            out_rows[r * step_o : r * step_o + D_v] = 0
            top[r], total[r] = -np.inf, 0
        for s0 in range(lo, hi, BLOCK_S):
            s1 = min(s0 + BLOCK_S, hi)
            seen = 0
            for t in range(t0, t1):
                seen += G * (max(s0, span[t, 0]) < min(s1, span[t, 1]))
            if seen == 0:
                continue
            transposed = seen >= ROWS_TRANSPOSED
            if transposed:
                _transpose(k, head, s0, s1, D, keys)
            finite, known = False, False
            start = 0
            while start < rows:
                end, a, b = _rows_alike(span, t0, G, start, rows, s0, s1)
                if a < b:
                    if transposed and end < min(start + ROWS, rows):
                        if not known:
                            finite, known = _finite(v, head, s0, s1), True
                        if finite:
                            end = min(start + ROWS, rows)
                            a, b = _keys_of_all(span, t0, G, start, end, s0, s1)
                    groups = (end - start + ROWS - 1) // ROWS
                    for group in range(groups):
                        r0 = start + group * (end - start) // groups
                        r1 = start + (group + 1) * (end - start) // groups
                        if transposed:
                            _score_transposed(keys, a - s0, b - a, queries, r0, r1, step_q, D, scores, step_s, ones)
                        else:
                            _score(k, head, a, b - a, queries, r0, r1, step_q, D, scores, step_s)
                        for r in range(r0, r1):
                            t = t0 + r // G
                            first = min(max(a, span[t, 0]), b)
                            last = max(min(b, span[t, 1]), first)
                            at = (r - r0) * step_s - a  # of key 0, if there were scores for it
                            scores[at + a : at + first] = 0
                            scores[at + last : at + b] = 0
                            if log_weight.size:
                                for i in range(first, last):
                                    scores[at + i] += log_weight[head, i]
                            keep[r] = _softmax_block(scores, at + first, last - first, top, total, r)
                        _add_values(v, head, a, b - a, scores, step_s, out_rows, r0, r1, step_o, D_v, keep)
                start = end
        for r in range(rows):
            t, g = t0 + r // G, r % G
            if total[r] == 0:
                lse[chunk, t, head, g] = -np.inf
                out[chunk, t, head, g] = 0
            else:
                lse[chunk, t, head, g] = top[r] + np.float32(math.log(total[r]))
                for d in range(D_v):
                    out[chunk, t, head, g, d] = out_rows[r * step_o + d] / total[r]


@jit(parallel=True)
def _attend_parallel(q, k, v, scale, span, log_weight, tokens, out, lse, buffers, counter, workers):
    for i in numba.prange(workers):
        _attend(q, k, v, scale, span, log_weight, tokens, out, lse, buffers[i], counter)


@jit()
def _fetch(x, x0, row, rows, D):
    """Asks for rows to come, in the order of memory: the tiles jump between rows, which the hardware cannot foresee."""
    for i in range(rows):
        for d in range(0, D, 16):
            prefetch(x, x0 + (AHEAD + i) * row + d)


@jit()
def _steps(D, D_v):
    """Distances between rows of queries, outputs and scores in a worker's buffer, and of how many rows its keys are."""
    return (D + 15) // 16 * 16 + PAD, (D_v + 15) // 16 * 16 + PAD, BLOCK_S + PAD, (D + TILE_K - 1) // TILE_K * TILE_K


@jit()
def _chunk_of_keys(span, t0, t1, S, chunk, chunks):
    """Of the keys that any of these tokens sees, the chunk's share, in whole blocks."""
    lo, hi = S, 0
    for t in range(t0, t1):
        if span[t, 0] < span[t, 1]:
            lo, hi = min(lo, span[t, 0]), max(hi, span[t, 1])
    lo, hi = max(lo, 0), min(hi, S)
    share = (max(hi - lo, 0) + chunks * BLOCK_S - 1) // (chunks * BLOCK_S) * BLOCK_S
    return lo + chunk * share, min(hi, lo + (chunk + 1) * share)


@jit()
def _rows_alike(span, t0, G, r0, rows, s0, s1):
    """The end of the rows from r0 on that see the same keys a <= s < b of this block; a; b."""
    a, b = max(s0, span[t0 + r0 // G, 0]), min(s1, span[t0 + r0 // G, 1])
    r1 = r0 + 1
    while r1 < rows:
        t = t0 + r1 // G
        if max(s0, span[t, 0]) != a or min(s1, span[t, 1]) != b:
            break
        r1 += 1
    return r1, a, b


@jit()
def _keys_of_all(span, t0, G, r0, r1, s0, s1):
    """The keys a <= s < b of this block that any of the rows sees."""
    a, b = s1, s0
    for t in range(t0 + r0 // G, t0 + (r1 - 1) // G + 1):
        if max(s0, span[t, 0]) < min(s1, span[t, 1]):
            a, b = min(a, max(s0, span[t, 0])), max(b, min(s1, span[t, 1]))
    return a, b


@jit()
def _finite(x, head, s0, s1):
    """Whether these rows hold no inf and no NaN, so that a weight of 0 takes them out of a sum."""
    top_bits = np.int32(0)
    for s in range(s0, s1):
        for d in range(np.uint64(x.shape[2])):
            top_bits = max(top_bits, np.int32(np.float32(x[head, s, d]).view(np.int32) & 0x7FFFFFFF))
    return top_bits < np.int32(0x7F800000)


@jit()
def _score(k, head, a, n, queries, r0, r1, step_q, D, scores, step_s):
    """scores[(r - r0) step_s + i] = q_r . k_{a + i}."""
    row = k.strides[1] // 4
    k0, q0 = head * (k.strides[0] // 4) + a * row, r0 * step_q
    apart = n // STREAMS
    for i in range(apart):
        dot_wide(k, k0 + i * row, apart * row, queries, q0, step_q, D, scores, i, apart, step_s, r1 - r0)
    for i in range(STREAMS * apart, n):
        dot_row(k, k0 + i * row, row, queries, q0, step_q, D, scores, i, 1, step_s, r1 - r0)


@jit()
def _transpose(k, head, s0, s1, D, keys):
    """keys[d BLOCK_S + i] = k_{s0 + i}[d]."""
    row = k.strides[1] // 4
    k0 = head * (k.strides[0] // 4) + s0 * row
    for i in range(0, s1 - s0, LANES):
        _fetch(k, k0 + i * row, row, LANES, D)
        for d in range(0, D, TILE_K):
            at = k0 + i * row + d
            transpose_tile(k, at, row, min(LANES, s1 - s0 - i), min(TILE_K, D - d), keys, d * BLOCK_S + i, BLOCK_S)


@jit()
def _score_transposed(keys, a, n, queries, r0, r1, step_q, D, scores, step_s, ones):
    """scores[(r - r0) step_s + i] = q_r . k_i for the i-th key from the block's a-th on."""
    i = 0
    while i < n:
        width = SUM_VECTORS * LANES if n - i >= SUM_VECTORS * LANES else min(LANES, n - i)
        sum_tile(
            queries, r0 * step_q, step_q, keys, a + i, BLOCK_S, D, scores, i, step_s, ones, 0, True, width, r1 - r0
        )
        i += width


@jit(exact=True)
def _softmax_block(scores, at, n, top, total, row):
    """Scores to weights in place, the row's running maximum and sum brought up to date; what the old sum is worth now.

    The maximum is taken of the floats' bits in integer order: unlike a maximum of floats it vectorises, and NaN wins.
    """
    top_bits = np.int32(-0x7F800001)  # -inf
    for s in range(np.uint64(at), np.uint64(at + n)):
        bits = np.float32(scores[s]).view(np.int32)
        top_bits = max(top_bits, np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))
    top_bits = np.int32(top_bits ^ ((top_bits >> 31) & 0x7FFFFFFF))
    new = np.int32(top_bits).view(np.float32)
    old = top[row]
    new = old if new < old else new
    top[row] = new
    base = np.float32(0) if new == np.float32(-np.inf) else new  # no key yet: exp(-inf - 0) = 0
    keep = np.float32(math.exp(old - base))
    total[row] = total[row] * keep + exp_row(scores, at, n, base)
    return keep


@jit()
def _add_values(v, head, a, n, scores, step_s, out_rows, r0, r1, step_o, D_v, keep):
    """out_r = keep_r out_r + sum_i scores[(r - r0) step_s + i] v_{a + i}."""
    row = v.strides[1] // 4
    v0 = head * (v.strides[0] // 4) + a * row
    d = 0
    while d < D_v:
        width = min(LANES, D_v - d)
        if D_v - d >= 2 * SUM_VECTORS * LANES and r1 - r0 <= SUM_ROWS // 2:
            width = 2 * SUM_VECTORS * LANES
        elif D_v - d >= SUM_VECTORS * LANES:
            width = SUM_VECTORS * LANES
        sum_tile(
            scores, 0, step_s, v, v0 + d, row, n, out_rows, r0 * step_o + d, step_o, keep, r0, False, width, r1 - r0
        )
        d += width


@jit()
def _merge_chunks(out_CTKGD, lse_CTKG):
    """The states of the chunks merged into the first."""
    C, T, K, G, D = out_CTKGD.shape
    for t in range(T):
        for h in range(K):
            for g in range(G):
                top = lse_CTKG[0, t, h, g]
                for c in range(1, C):
                    if not lse_CTKG[c, t, h, g] <= top:  # so written that a NaN wins
                        top = lse_CTKG[c, t, h, g]
                base = np.float32(0) if top == np.float32(-np.inf) else top
                total = np.float32(0)
                for c in range(C):
                    weight = np.float32(math.exp(lse_CTKG[c, t, h, g] - base))
                    total += weight
                    lse_CTKG[c, t, h, g] = weight
                if total == 0:
                    lse_CTKG[0, t, h, g] = -np.inf
                    continue  # each chunk's out is 0
                for d in range(D):
                    mean = np.float32(0)
                    for c in range(C):
                        mean += lse_CTKG[c, t, h, g] * out_CTKGD[c, t, h, g, d]
                    out_CTKGD[0, t, h, g, d] = mean / total
                lse_CTKG[0, t, h, g] = base + np.float32(math.log(total))
