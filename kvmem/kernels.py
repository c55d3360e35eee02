"""Numba twins of select.py's three steps: they read an index, the shortlisted records, and nothing else.

`best` never holds a matrix of scores. A worker takes (kv head, tile of queries, chunk of units), scores one block of units
after another for all its queries, and lists for each query the units above a limit; a full list is cut down to its k best,
the worst of which is the new limit. The k best of a row are the same however its units are cut into chunks, and rows share
no sums: neither the threads nor the other queries change a bit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from kvmem.index import BLOCK, Index, Keys, PageBounds, ShortKeys, SignBits
from kvmem.select import top
from npqwen import threads
from npqwen.jit import jit
from npqwen.kernels_simd import (
    LANES,
    MASKED,
    SUM_ROWS,
    SUM_VECTORS,
    TILE_K,
    above,
    dot_row,
    exp_row,
    lowest_bit,
    prefetch,
    sum_masked,
    sum_tile,
    take,
    transpose_tile,
)
from npqwen.scratch import scratch

assert BLOCK == MASKED
TILE = 48  # queries that meet a block together
ITEMS = 8  # wanted at least, so that threads end together; chunks are not cut below MIN_CHUNK units for it
MIN_CHUNK = 1024
ROWS = 16  # queries of one item in the steps after `best`
PAD = 16
AHEAD = 4  # records asked for before they are used: they lie anywhere
ALONE = 1 << 14  # numbers read: below, starting the threads costs more than they save

KNOWN = (Keys, SignBits, ShortKeys, PageBounds)
KEYS, SIGNS, FLOATS = 0, 1, 2  # how they lie in memory


def best(index: Index, q_KRD: np.ndarray, k: int) -> np.ndarray:
    """The k units that an index scores highest for each query, (K, R, k), int64, in index order.

    An index that these kernels do not know gives its scores in NumPy.
    """
    if not isinstance(index, KNOWN):
        return top(index.scores(q_KRD), k)
    K, R, D = q_KRD.shape
    U = index.n_units
    n_tiles = -(-R // TILE)
    chunks = max(1, min(-(-ITEMS // max(1, K * n_tiles)), U // MIN_CHUNK))
    found_KRCk, score_KRCk = np.empty((K, R, chunks, k), np.int64), np.empty((K, R, chunks, k), np.float32)
    if found_KRCk.size:
        source = _source(index, q_KRD)
        per_query = _step(source) + 2 * _capacity.py_func(k) + 2
        others = SUM_ROWS * (BLOCK + PAD) + BLOCK * -(-D // TILE_K) * TILE_K + PAD
        _run("best", TILE * per_query + others, K * R * U, (*source, U, score_KRCk, found_KRCk))
    if chunks > 1:
        _compiled("merge", parallel=False)(score_KRCk, found_KRCk)
    return found_KRCk[:, :, 0]


def recheck(q_KRD: np.ndarray, k_KMD: np.ndarray, short_KRc: np.ndarray, k: int) -> np.ndarray:
    """The k of each query's shortlist with the largest exact scores, (K, R, k)."""
    out_KRk = np.empty((*q_KRD.shape[:2], k), np.int64)
    if out_KRk.size:
        _run("recheck", 3 * short_KRc.shape[2], short_KRc.size * q_KRD.shape[2], (q_KRD, k_KMD, short_KRc, out_KRk))
    return out_KRk


def attend_chosen(
    q_KRD: np.ndarray, k_KMD: np.ndarray, v_KMD: np.ndarray, chosen_KRk: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """State (out_KRD, lse_KR) of each query over its own records; an index of -1 is no record."""
    out_KRD, lse_KR = np.empty(q_KRD.shape, np.float32), np.empty(q_KRD.shape[:2], np.float32)
    if lse_KR.size:
        arrays = (q_KRD, k_KMD, v_KMD, chosen_KRk, np.float32(scale), out_KRD, lse_KR)
        _run("attend", chosen_KRk.shape[2] + 1, chosen_KRk.size * q_KRD.shape[2], arrays)
    return out_KRD, lse_KR


def _source(index: Index, q_KRD: np.ndarray) -> tuple[Any, ...]:
    """What the kernel reads of an index: its kind, queries, a basis they are turned into, keys, bits, floats."""
    keys, bits = np.empty((0, 0, 0), np.float32), np.empty((0, 0, 0), np.uint64)
    basis, floats = np.empty((0, 0, 0), np.float32), np.empty((0, 0, 0, 0), np.float32)
    match index:
        case Keys(k_KMD):
            return KEYS, q_KRD, basis, k_KMD, bits, floats
        case SignBits(bits_KbD):
            return SIGNS, q_KRD, basis, keys, bits_KbD, floats
        case ShortKeys(basis_KDr, short_KbrI):
            return FLOATS, q_KRD, basis_KDr, keys, bits, short_KbrI
        case PageBounds(bounds_KbxI):
            return FLOATS, index.parts(q_KRD), basis, keys, bits, bounds_KbxI
    raise TypeError(f"{type(index).__name__} has no kernel")


def _step(source: tuple[Any, ...]) -> int:
    """Distance between the rows of queries in a worker's buffer."""
    _, q_KRD, basis, *_ = source
    return -(-(basis.shape[2] or q_KRD.shape[2]) // LANES) * LANES + PAD


def _run(name: str, per_worker: int, work: int, arguments: tuple[Any, ...]) -> None:
    """One kernel at a time; its workers take items from a counter and have a part of one buffer each."""
    per_worker = -(-per_worker // 16) * 16
    counter = np.zeros(1, np.int64)
    with threads.lock:
        workers = threads.workers()
        buffers = scratch("select", workers * per_worker).reshape(workers, per_worker)
        if workers == 1 or work < ALONE:
            _compiled(name, parallel=False)(*arguments, buffers[0], counter)
        else:
            _compiled(name, parallel=True)(*arguments, buffers, counter, workers)


@jit(exact=True)
def _best(kind, q, basis, keys, bits, floats, n_units, score_KRCk, found_KRCk, buffer, counter):
    K, R, C, k = found_KRCk.shape
    D = q.shape[2]
    X = basis.shape[2] if basis.size else D
    step, capacity = (X + LANES - 1) // LANES * LANES + PAD, _capacity(k)
    queries, buffer = buffer[: TILE * step], buffer[TILE * step :]
    scores, buffer = buffer[: SUM_ROWS * (BLOCK + PAD)], buffer[SUM_ROWS * (BLOCK + PAD) :]
    listed, buffer = buffer[: 2 * TILE * capacity].view(np.int32), buffer[2 * TILE * capacity :]
    ranks, units = listed[: TILE * capacity].reshape(TILE, capacity), listed[TILE * capacity :].reshape(TILE, capacity)
    limits, counts, buffer = buffer[:TILE], buffer[TILE : 2 * TILE].view(np.int32), buffer[2 * TILE :]
    ones, turned = buffer[:PAD], buffer[PAD:]
    ones[:] = 1
    n_blocks, n_tiles = (n_units + BLOCK - 1) // BLOCK, (R + TILE - 1) // TILE
    while True:
        item: int = take(counter)
        if item >= K * n_tiles * C:
            return
        chunk, item = item % C, item // C
        head, tile = item // n_tiles, item % n_tiles
        r0, r1 = tile * TILE, min((tile + 1) * TILE, R)
        for r in range(r0, r1):
            if basis.size:
                _multiply(q, (head * R + r) * D, D, basis, head * D * X, X, queries, (r - r0) * step, ones)
            else:
                queries[(r - r0) * step : (r - r0) * step + D] = q[head, r]
        limits[:] = -np.inf
        counts[:] = 0
        for block in range(chunk * n_blocks // C, (chunk + 1) * n_blocks // C):
            n = min(BLOCK, n_units - block * BLOCK)
            inside = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(BLOCK - n)
            if kind == KEYS:
                _turn(keys, head, block * BLOCK, n, D, turned)
            groups = (r1 - r0 + SUM_ROWS - 1) // SUM_ROWS
            for group in range(groups):
                a, b = group * (r1 - r0) // groups, (group + 1) * (r1 - r0) // groups
                if kind == SIGNS:  # twice the sum over the dimensions of sign 1, less the sum over all, is q . sign(k)
                    at = (head * n_blocks + block) * X
                    sum_masked(queries, a * step, step, bits, at, X, scores, 0, BLOCK + PAD, b - a)
                elif kind == KEYS:
                    _sum_block(queries, a * step, step, turned, 0, X, scores, ones, b - a)
                else:
                    at = (head * n_blocks + block) * X * BLOCK
                    _sum_block(queries, a * step, step, floats, at, X, scores, ones, b - a)
                for r in range(a, b):
                    _list(
                        scores, (r - a) * (BLOCK + PAD), inside, block * BLOCK, k, ranks[r], units[r], limits, counts, r
                    )
        for r in range(r1 - r0):
            n = counts[r]
            if n > k:
                _keep_best(ranks[r], units[r], n, k)
            for i in range(k):
                score_KRCk[head, r0 + r, chunk, i] = _score(ranks[r, i]) if i < n else np.float32(-np.inf)
                found_KRCk[head, r0 + r, chunk, i] = units[r, i] if i < n else -1


@jit(exact=True)
def _multiply(q, q0, D, basis, b0, X, out, out0, ones):
    """out[out0 + x] = sum_d q[q0 + d] basis[b0 + d X + x]."""
    for x in range(0, X, LANES):
        sum_tile(q, q0, 0, basis, b0 + x, X, D, out, out0 + x, 0, ones, 0, True, min(LANES, X - x), 1)


@jit(exact=True)
def _sum_block(queries, q0, step, x, x0, X, scores, ones, rows):
    """Scores of a block's units, whose numbers lie dimension by dimension in x."""
    for i in range(0, BLOCK, SUM_VECTORS * LANES):
        width = SUM_VECTORS * LANES
        sum_tile(queries, q0, step, x, x0 + i, BLOCK, X, scores, i, BLOCK + PAD, ones, 0, True, width, rows)


@jit(exact=True)
def _turn(keys, head, m0, n, D, turned):
    """turned[d BLOCK + i] = k_{m0 + i}[d]."""
    row = keys.strides[1] // 4
    k0 = head * (keys.strides[0] // 4) + m0 * row
    for i in range(0, n, LANES):
        for d in range(0, D, TILE_K):
            at = k0 + i * row + d
            transpose_tile(keys, at, row, min(LANES, n - i), min(TILE_K, D - d), turned, d * BLOCK + i, BLOCK)


@jit(exact=True)
def _capacity(k):
    """Units that a list holds before it is cut down: the more, the fewer times it is, but the later its limit rises."""
    return max(6 * k, BLOCK)


@jit(exact=True)
def _list(scores, at, inside, first, k, ranks, units, limits, counts, r):
    """Lists the units of a block whose scores are above the limit; NaN never is."""
    n = counts[r]
    better = np.uint64(above(scores, at, limits[r]) & inside)
    while better:
        i = lowest_bit(better)
        better = np.uint64(better & (better - np.uint64(1)))
        ranks[n], units[n] = _rank(scores[at + i]), first + i
        n += 1
        if n == len(ranks):
            limits[r] = _score(_keep_best(ranks, units, n, k))
            n = k
    counts[r] = n


@jit(exact=True)
def _rank(score):
    """An int32 in the order of the floats: numbers to count below vectorise, and so does their search."""
    bits = np.float32(score + np.float32(0)).view(np.int32)  # -0 becomes 0, which it equals
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@jit(exact=True)
def _score(rank):
    return np.int32(rank ^ ((rank >> 31) & 0x7FFFFFFF)).view(np.float32)


@jit(exact=True)
def _keep_best(ranks, units, n, k):
    """The k largest of the first n ranks, with their units, to the front in the order they had; of equal ones the first.

    Returns a rank that exactly these reach, or the lowest of them where others are equal to it. It is searched between
    the lowest and the highest: halfway between their scores, which seldom takes ten steps, and if it does, between ranks,
    which takes 32 at most. n is more than k.
    """
    low, high = ranks[0], ranks[0]
    for i in range(np.uint64(n)):
        low, high = min(low, ranks[i]), max(high, ranks[i])
    step = 0
    while low < high:
        middle = _rank(np.float32(0.5) * _score(low) + np.float32(0.5) * _score(high))
        if step >= 16 or not low < middle <= high:
            middle = np.int32(np.int64(low) + (np.int64(high) - np.int64(low) + 1) // 2)
        count = np.int32(0)
        for i in range(np.uint64(n)):
            count += np.int32(ranks[i] >= middle)
        if count >= k:
            low = middle
        else:
            high = np.int32(middle - 1)
        if count == k:
            break
        step += 1
    ties = k
    for i in range(np.uint64(n)):
        ties -= ranks[i] > low
    at = 0
    for i in range(np.uint64(n)):
        rank, tie = ranks[i], ranks[i] == low
        if rank > low or (tie and ties > 0):
            ranks[at], units[at] = rank, units[i]
            at += 1
        ties -= tie
    return low


@jit(exact=True)
def _merge(score_KRCk, found_KRCk):
    """The best of all chunks of a row in its first; the chunks are in the order of their units."""
    K, R, C, k = found_KRCk.shape
    ranks, units = np.empty(C * k, np.int32), np.empty(C * k, np.int64)
    for head in range(K):
        for r in range(R):
            n = 0
            for chunk in range(C):
                for i in range(k):
                    if found_KRCk[head, r, chunk, i] >= 0:
                        ranks[n], units[n] = _rank(score_KRCk[head, r, chunk, i]), found_KRCk[head, r, chunk, i]
                        n += 1
            if n > k:
                _keep_best(ranks, units, n, k)
            for i in range(min(n, k)):
                found_KRCk[head, r, 0, i] = units[i]


@jit(exact=True)
def _dots(q, q0, D, k, head, chosen, scores):
    """scores[i] = q . k_m for the i-th chosen record m; -inf where there is none."""
    row, k0 = k.strides[1] // 4, head * (k.strides[0] // 4)
    n = len(chosen)
    for i in range(-AHEAD, n):
        if i + AHEAD < n:
            for d in range(0, D, 16):
                prefetch(k, k0 + max(chosen[i + AHEAD], 0) * row + d)
        if i >= 0:
            if chosen[i] < 0:
                scores[i] = -np.inf
            else:
                dot_row(q, q0, D, k, k0 + chosen[i] * row, row, D, scores, i, 0, False, 1)


@jit(exact=True)
def _recheck(q, k, short_KRc, out_KRk, buffer, counter):
    K, R, D = q.shape
    c, k_best = short_KRc.shape[2], out_KRk.shape[2]
    scores, listed = buffer[:c], buffer[c : 3 * c].view(np.int32)
    ranks, units = listed[:c], listed[c:]
    tiles = (R + ROWS - 1) // ROWS
    while True:
        item: int = take(counter)
        if item >= K * tiles:
            return
        head, r0 = item // tiles, item % tiles * ROWS
        for r in range(r0, min(r0 + ROWS, R)):
            short, out = short_KRc[head, r], out_KRk[head, r]
            _dots(q, (head * R + r) * D, D, k, head, short, scores)
            n = 0
            for i in range(c):
                if scores[i] > -np.inf:  # NaN is never among the best
                    ranks[n], units[n] = _rank(scores[i]), short[i]
                    n += 1
            if n > k_best:
                _keep_best(ranks, units, n, k_best)
            for i in range(k_best):
                out[i] = units[i] if i < n else -1


@jit(exact=True)
def _attend(q, k, v, chosen_KRk, scale, out_KRD, lse_KR, buffer, counter):
    K, R, D = q.shape
    n = chosen_KRk.shape[2]
    weights, ones = buffer[:n], buffer[n : n + 1]
    ones[0] = 1
    row, tiles = v.strides[1] // 4, (R + ROWS - 1) // ROWS
    while True:
        item: int = take(counter)
        if item >= K * tiles:
            return
        head, r0 = item // tiles, item % tiles * ROWS
        v0 = head * (v.strides[0] // 4)
        for r in range(r0, min(r0 + ROWS, R)):
            chosen, at = chosen_KRk[head, r], (head * R + r) * D
            for i in range(min(n, AHEAD)):
                for d in range(0, D, 16):
                    prefetch(v, v0 + max(chosen[i], 0) * row + d)
            _dots(q, at, D, k, head, chosen, weights)
            top = np.float32(-np.inf)
            for i in range(n):
                weights[i] *= scale
                top = weights[i] if not weights[i] <= top else top  # so written that a NaN wins
            total = exp_row(weights, 0, n, top)
            for i in range(n):
                weights[i] /= total
            out_KRD[head, r] = 0
            for i in range(n):
                if i + AHEAD < n:
                    for d in range(0, D, 16):
                        prefetch(v, v0 + max(chosen[i + AHEAD], 0) * row + d)
                if chosen[i] >= 0:
                    _add(weights, i, v, v0 + chosen[i] * row, D, out_KRD, at, ones)
            lse_KR[head, r] = top + np.float32(math.log(total))


@jit(exact=True)
def _add(weights, i, v, v0, D, out, out0, ones):
    """out[out0 + d] += weights[i] v[v0 + d]."""
    d = 0
    while d < D:
        width = SUM_VECTORS * LANES if D - d >= SUM_VECTORS * LANES else min(LANES, D - d)
        sum_tile(weights, i, 0, v, v0 + d, 0, 1, out, out0 + d, 0, ones, 0, False, width, 1)
        d += width


@jit(parallel=True, exact=True)
def _best_parallel(kind, q, basis, keys, bits, floats, n_units, score_KRCk, found_KRCk, buffers, counter, workers):
    for i in numba.prange(workers):
        _best(kind, q, basis, keys, bits, floats, n_units, score_KRCk, found_KRCk, buffers[i], counter)


@jit(parallel=True, exact=True)
def _recheck_parallel(q, k, short_KRc, out_KRk, buffers, counter, workers):
    for i in numba.prange(workers):
        _recheck(q, k, short_KRc, out_KRk, buffers[i], counter)


@jit(parallel=True, exact=True)
def _attend_parallel(q, k, v, chosen_KRk, scale, out_KRD, lse_KR, buffers, counter, workers):
    for i in numba.prange(workers):
        _attend(q, k, v, chosen_KRk, scale, out_KRD, lse_KR, buffers[i], counter)


def _read(dtype: Any, ndim: int, layout: Any = "C") -> Any:
    return types.Array(dtype, ndim, layout, readonly=True)


_Q, _CACHE, _CHOSEN = _read(types.float32, 3), _read(types.float32, 3, "A"), _read(types.int64, 3, "A")
_INDEX = (_read(types.float32, 3), _CACHE, _read(types.uint64, 3), _read(types.float32, 4))
_LISTS = (types.float32[:, :, :, ::1], types.int64[:, :, :, ::1])
_KERNELS = {
    "best": (_best, _best_parallel, (types.int64, _Q, *_INDEX, types.int64, *_LISTS)),
    "recheck": (_recheck, _recheck_parallel, (_Q, _CACHE, _CHOSEN, types.int64[:, :, ::1])),
    "attend": (
        *(_attend, _attend_parallel),
        (_Q, _CACHE, _CACHE, _CHOSEN, types.float32, types.float32[:, :, ::1], types.float32[:, ::1]),
    ),
}


@cache
def _compiled(name: str, parallel: bool) -> Any:
    """A kernel for one set of types that arrays of all strides convert to, not one for every mixture of strides."""
    if name == "merge":
        return _merge
    alone, many, arguments = _KERNELS[name]
    kernel = many if parallel else alone
    buffers = (
        (types.float32[:, ::1], types.int64[::1], types.int64) if parallel else (types.float32[::1], types.int64[::1])
    )
    kernel.compile(types.void(*arguments, *buffers))
    kernel.disable_compile()
    return kernel
