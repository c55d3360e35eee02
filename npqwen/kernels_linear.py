"""x w^T for weights as stored: few tokens in one pass over the matrix, more with rows widened once for all of them."""

from __future__ import annotations

import numba
import numpy as np

from npqwen import threads
from npqwen.jit import jit
from npqwen.kernels_simd import DOT_COLS, DOT_ROWS, dot_row, dot_tile, take, widen_row
from npqwen.scratch import scratch

ITEM_BYTES = 1 << 18  # of weights, for one turn of a worker in the one-pass kernel
BLOCK_N = 32  # weight rows widened at a time
BLOCK_T = 60  # tokens that meet the widened rows before the next ones: with BLOCK_K, what the L2 cache holds
BLOCK_K = 1024
PAD = 16  # rows whose distance is a power of two would all meet in the same few cache lines


def linear(x_TE: np.ndarray, w_NE: np.ndarray) -> np.ndarray:
    """x w^T, float32 (T, N), for a matrix as stored: bf16 bits, f16 or f32, anywhere in memory."""
    T, E = x_TE.shape
    N = len(w_NE)
    if w_NE.shape[1] != E:
        raise ValueError(f"linear: {x_TE.shape} does not fit a matrix of shape {w_NE.shape}")
    out_TN = np.empty((T, N), np.float32)
    if T * N * E == 0:
        out_TN.fill(0)
        return out_TN
    x_TE = np.ascontiguousarray(x_TE, np.float32)
    w_NE = _as_compiled(w_NE)
    with threads.lock:
        workers = threads.workers()
        counter = np.zeros(1, np.int64)
        if T <= DOT_COLS:
            rows = max(1, min(ITEM_BYTES // (E * w_NE.itemsize), N // 8) // DOT_ROWS) * DOT_ROWS
            if workers == 1 or N * E < 1 << 14:
                _few(x_TE, w_NE, out_TN, rows, counter)
            else:
                _few_parallel(x_TE, w_NE, out_TN, rows, counter, workers)
            return out_TN
        n_blocks = -(-E // BLOCK_K)
        block_K = -(-E // (n_blocks * 16)) * 16
        x_packed = scratch("x", n_blocks * T * (block_K + PAD))
        rows_packed = scratch("rows", workers * BLOCK_N * (block_K + PAD)).reshape(workers, -1)
        if workers == 1:
            _pack(x_TE, block_K, x_packed, counter)
            _many(x_packed, w_NE, out_TN, block_K, rows_packed[0], np.zeros(1, np.int64))
        else:
            _pack_parallel(x_TE, block_K, x_packed, counter, workers)
            _many_parallel(x_packed, w_NE, out_TN, block_K, rows_packed, np.zeros(1, np.int64), workers)
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


@jit()
def _few(x_TE, w_NE, out_TN, rows, counter):
    T, E = x_TE.shape
    N = len(w_NE)
    while True:
        n0 = take(counter) * rows
        if n0 >= N:
            return
        n1 = min(n0 + rows, N)
        n = n0
        while n + DOT_ROWS <= n1:
            dot_tile(w_NE, n * E, E, x_TE, 0, E, E, out_TN, n, N, False, T)
            n += DOT_ROWS
        while n < n1:
            dot_row(w_NE, n * E, E, x_TE, 0, E, E, out_TN, n, N, False, T)
            n += 1


@jit()
def _pack(x_TE, block_K, x_packed, counter):
    """x cut into blocks of columns, each with its rows one after another and PAD apart."""
    T, E = x_TE.shape
    while True:
        t0 = take(counter) * 16
        if t0 >= T:
            return
        for t in range(t0, min(t0 + 16, T)):
            for block in range(-(-E // block_K)):
                k0 = block * block_K
                widen_row(x_TE, t * E + k0, min(block_K, E - k0), x_packed, (block * T + t) * (block_K + PAD))


@jit()
def _many(x_packed, w_NE, out_TN, block_K, rows_packed, counter):
    T, N = out_TN.shape
    E = w_NE.shape[1]
    step = block_K + PAD
    groups = -(-T // DOT_COLS)  # of up to DOT_COLS tokens, as even as can be
    groups_at_once = max(1, BLOCK_T // DOT_COLS)
    while True:
        n0 = take(counter) * BLOCK_N
        if n0 >= N:
            return
        n1 = min(n0 + BLOCK_N, N)
        for block in range(-(-E // block_K)):
            k0 = block * block_K
            width = min(block_K, E - k0)
            for n in range(n0, n1):
                widen_row(w_NE, n * E + k0, width, rows_packed, (n - n0) * step)
            for g0 in range(0, groups, groups_at_once):
                g1 = min(g0 + groups_at_once, groups)
                n = n0
                while n < n1:
                    whole = n + DOT_ROWS <= n1
                    for g in range(g0, g1):
                        t0, t1 = g * T // groups, (g + 1) * T // groups
                        x0, out0, add = (block * T + t0) * step, t0 * N + n, block > 0
                        a0 = (n - n0) * step
                        if whole:
                            dot_tile(rows_packed, a0, step, x_packed, x0, step, width, out_TN, out0, N, add, t1 - t0)
                        else:
                            dot_row(rows_packed, a0, step, x_packed, x0, step, width, out_TN, out0, N, add, t1 - t0)
                    n += DOT_ROWS if whole else 1


@jit(parallel=True)
def _few_parallel(x_TE, w_NE, out_TN, rows, counter, workers):
    for _ in numba.prange(workers):
        _few(x_TE, w_NE, out_TN, rows, counter)


@jit(parallel=True)
def _many_parallel(x_packed, w_NE, out_TN, block_K, rows_packed, counter, workers):
    for i in numba.prange(workers):
        _many(x_packed, w_NE, out_TN, block_K, rows_packed[i], counter)


@jit(parallel=True)
def _pack_parallel(x_TE, block_K, x_packed, counter, workers):
    for _ in numba.prange(workers):
        _pack(x_TE, block_K, x_packed, counter)
