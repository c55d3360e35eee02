"""x w^T for weights as stored: few tokens in one pass over the matrix, more against blocks of it, widened and transposed.

On a machine with matrix tiles, products of more than a few tokens with bf16 weights are those of kernels_tiles.
"""

from __future__ import annotations

from functools import cache

import numba
import numpy as np

from npqwen import kernels_tiles, threads
from npqwen.jit import jit
from npqwen.kernels_simd import (
    DOT_COLS,
    DOT_ROWS,
    LANES,
    SUM_ROWS,
    SUM_VECTORS,
    TILE_K,
    WIDE_COLS,
    dot_row,
    dot_tile,
    dot_wide,
    sum_tile,
    take,
    transpose_tile,
)
from npqwen.scratch import scratch

# The one-pass kernel waits for memory alone. STREAMS rows far apart are read at once: each asks for its next line while the
# others wait, which is worth twice the speed of neighbouring rows where the hardware does not look ahead.
STREAMS = 2 * DOT_ROWS
BLOCK_N = SUM_VECTORS * LANES  # weight rows transposed together
BLOCK_K = 256  # and how many of their columns: the block stays in the innermost caches while all tokens pass
ALONE = 1 << 14  # weights: below, starting the threads costs more than they save
TILES = True  # matrix tiles, where there are any
BLOCK_T = 128  # tokens for which transposing a block again is cheap, if it takes that to give every thread work


def linear(x_TE: np.ndarray, w_NE: np.ndarray) -> np.ndarray:
    """x w^T, float32 (T, N), for a matrix as stored: bf16 bits, f16 or f32, anywhere in memory."""
    return linears(x_TE, w_NE)[0]


def linears(x_TE: np.ndarray, *w_NE: np.ndarray) -> list[np.ndarray]:
    """x w^T for up to three matrices that share their input and dtype: the threads start and meet once."""
    T, E = x_TE.shape
    out_TN = []
    for w in w_NE:
        if w.shape[1] != E:
            raise ValueError(f"linear: {x_TE.shape} does not fit a matrix of shape {w.shape}")
        out_TN.append(np.empty((T, len(w)), np.float32))
    if T == 0 or E == 0:
        for out in out_TN:
            out.fill(0)
        return out_TN
    x_TE = np.ascontiguousarray(x_TE, np.float32)
    matrices = [_as_compiled(w) for w in w_NE]
    w0, w1, w2 = (*matrices, *[_nothing(matrices[0].dtype)] * (3 - len(matrices)))
    out0, out1, out2 = (*out_TN, *[out_TN[0]] * (3 - len(matrices)))
    counters = np.zeros(4, np.int64)
    with threads.lock:
        workers = threads.workers()
        if T <= DOT_COLS:
            if workers == 1 or sum(map(len, matrices)) * E < ALONE:
                _few(x_TE, w0, out0, w1, out1, w2, out2, counters, 1)
            else:
                _few_parallel(x_TE, w0, out0, w1, out1, w2, out2, counters, workers)
        elif TILES and kernels_tiles.available() and all(map(kernels_tiles.fit, matrices)):
            kernels_tiles.products(x_TE, w0, out0, w1, out1, w2, out2, counters, workers)
        else:
            blocks = scratch("linear", workers * (BLOCK_K * BLOCK_N + 16)).reshape(workers, -1)
            if workers == 1:
                _many(x_TE, w0, out0, w1, out1, w2, out2, blocks[0], counters)
            else:
                _many_parallel(x_TE, w0, out0, w1, out1, w2, out2, blocks, counters, workers)
    return out_TN


def _as_compiled(w_NE: np.ndarray) -> np.ndarray:
    """A view that says read-only and unaligned, whatever the matrix is: the kernels are compiled once for all."""
    if w_NE.dtype == np.float16:
        w_NE = w_NE.view(np.int16)  # Numba has no float16 arrays on a CPU
    elif w_NE.dtype not in (np.uint16, np.float32):
        raise ValueError(f"linear: weights of {w_NE.dtype} are not implemented (uint16 for bf16, float16, float32)")
    view = np.ascontiguousarray(w_NE).view(np.ndarray)
    view.setflags(write=False, align=False)
    return view


@cache
def _nothing(dtype: np.dtype) -> np.ndarray:
    """A matrix without rows, in place of the second or third that a call does not have."""
    return _as_compiled(np.empty((0, 1), dtype).view(np.float16 if dtype == np.int16 else dtype))


@jit()
def _few(x_TE, w0, out0, w1, out1, w2, out2, counters, workers):
    _few_one(x_TE, w0, out0, counters[0:], workers)
    _few_one(x_TE, w1, out1, counters[1:], workers)
    _few_one(x_TE, w2, out2, counters[2:], workers)


@jit()
def _few_one(x_TE, w_NE, out_TN, counter, workers):
    T, E = x_TE.shape
    N = len(w_NE)
    while True:
        n0, n1 = _stretch(take(counter), N, workers)
        if n0 >= N:
            return
        apart = (n1 - n0) // STREAMS
        for n in range(n0, n0 + apart):
            if T <= WIDE_COLS:
                dot_wide(w_NE, n * E, apart * E, x_TE, 0, E, E, out_TN, n, apart, N, T)
            else:
                for half in range(n, n + STREAMS * apart, DOT_ROWS * apart):
                    dot_tile(w_NE, half * E, apart * E, x_TE, 0, E, E, out_TN, half, apart, N, T)
        for n in range(n0 + STREAMS * apart, n1):
            dot_row(w_NE, n * E, E, x_TE, 0, E, E, out_TN, n, 1, N, T)


@jit()
def _stretch(turn, N, workers):
    """The rows of a turn. Every round of turns takes half of what is left: long stretches, and yet all end together."""
    n0 = 0
    for _ in range(turn // workers):
        n0 += workers * _share(N - n0, workers)
    share = _share(N - n0, workers)
    n0 += turn % workers * share
    return n0, min(n0 + share, N)


@jit()
def _share(left, workers):
    return max(left // (2 * workers * STREAMS), 1) * STREAMS


@jit(parallel=True)
def _few_parallel(x_TE, w0, out0, w1, out1, w2, out2, counters, workers):
    for _ in numba.prange(workers):
        _few(x_TE, w0, out0, w1, out1, w2, out2, counters, workers)


@jit()
def _many(x_TE, w0, out0, w1, out1, w2, out2, buffer, counters):
    _many_one(x_TE, w0, out0, buffer, counters[0:])
    _many_one(x_TE, w1, out1, buffer, counters[1:])
    _many_one(x_TE, w2, out2, buffer, counters[2:])


@jit()
def _many_one(x_TE, w_NE, out_TN, buffer, counter):
    T, E = x_TE.shape
    N = len(w_NE)
    n_blocks_K = (E + BLOCK_K - 1) // BLOCK_K
    block_K = (E + n_blocks_K * TILE_K - 1) // (n_blocks_K * TILE_K) * TILE_K
    t_blocks = max(1, min(T // BLOCK_T, 16 * BLOCK_N // max(N, 1)))
    block, ones = buffer[: block_K * BLOCK_N], buffer[block_K * BLOCK_N :]
    ones[:] = 1
    n_blocks = (N + BLOCK_N - 1) // BLOCK_N
    while True:
        item = take(counter)
        if item >= n_blocks * t_blocks:
            return
        n0, t_block = item % n_blocks * BLOCK_N, item // n_blocks
        n1 = min(n0 + BLOCK_N, N)
        t_from, t_to = t_block * T // t_blocks, (t_block + 1) * T // t_blocks
        groups = (t_to - t_from + SUM_ROWS - 1) // SUM_ROWS  # of tokens, as even as can be
        for k0 in range(0, E, block_K):
            k1 = min(k0 + block_K, E)
            for n in range(n0, n1, LANES):
                for k in range(k0, k1, TILE_K):
                    at = (k - k0) * BLOCK_N + n - n0
                    transpose_tile(w_NE, n * E + k, E, min(LANES, n1 - n), min(TILE_K, k1 - k), block, at, BLOCK_N)
            for group in range(groups):
                t0 = t_from + group * (t_to - t_from) // groups
                rows = t_from + (group + 1) * (t_to - t_from) // groups - t0
                x0, first = t0 * E + k0, k0 == 0
                n = n0
                while n < n1:
                    width = BLOCK_N if n1 - n >= BLOCK_N else min(LANES, n1 - n)
                    out0 = t0 * N + n
                    sum_tile(x_TE, x0, E, block, n - n0, BLOCK_N, k1 - k0, out_TN, out0, N, ones, 0, first, width, rows)
                    n += width


@jit(parallel=True)
def _many_parallel(x_TE, w0, out0, w1, out1, w2, out2, buffers, counters, workers):
    for i in numba.prange(workers):
        _many(x_TE, w0, out0, w1, out1, w2, out2, buffers[i], counters)
