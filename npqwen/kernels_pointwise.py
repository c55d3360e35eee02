"""The parts of a layer between its products, each in one pass over memory."""

from __future__ import annotations

import math

import numba
import numpy as np

from npqwen import threads
from npqwen.jit import jit
from npqwen.kernels_simd import swiglu_row, take

ROWS = 16  # of a turn of a worker
ALONE = 1 << 16  # values: below, starting the threads costs more than they save


def rms_norm(x_TE: np.ndarray, weight_E: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    x = np.ascontiguousarray(x_TE, np.float32).reshape(-1, x_TE.shape[-1])
    out = np.empty_like(x)
    _run(_rms_norm, _rms_norm_parallel, x, np.ascontiguousarray(weight_E, np.float32), np.float32(eps), out)
    return out.reshape(x_TE.shape)


def rope(x_HTD: np.ndarray, cos_T2: np.ndarray, sin_T2: np.ndarray) -> np.ndarray:
    """Channel pair (i, i + D/2) of every head turned by its position's angle i."""
    x = np.ascontiguousarray(x_HTD, np.float32)
    out = np.empty_like(x)
    _run(_rope, _rope_parallel, x, np.ascontiguousarray(cos_T2), np.ascontiguousarray(sin_T2), out)
    return out


def swiglu(gate_TF: np.ndarray, up_TF: np.ndarray) -> np.ndarray:
    """silu(gate) * up."""
    gate, up = np.ascontiguousarray(gate_TF, np.float32), np.ascontiguousarray(up_TF, np.float32)
    out = np.empty_like(gate)
    _run(_swiglu, _swiglu_parallel, gate.reshape(-1), up.reshape(-1), out.reshape(-1))
    return out


def _run(alone, parallel, *arguments):
    with threads.lock:
        workers = threads.workers()
        if workers == 1 or arguments[0].size < ALONE:
            alone(*arguments, np.zeros(1, np.int64))
        else:
            parallel(*arguments, np.zeros(1, np.int64), workers)


@jit()
def _rms_norm(x_TE, weight_E, eps, out_TE, counter):
    T, E = x_TE.shape
    while True:
        t0 = take(counter) * ROWS
        if t0 >= T:
            return
        for t in range(np.uint64(t0), np.uint64(min(t0 + ROWS, T))):
            total = np.float32(0)
            for e in range(np.uint64(E)):
                total += x_TE[t, e] * x_TE[t, e]
            factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(E) + eps))
            for e in range(np.uint64(E)):
                out_TE[t, e] = x_TE[t, e] * factor * weight_E[e]


@jit()
def _rope(x_HTD, cos_T2, sin_T2, out_HTD, counter):
    H, T, D = x_HTD.shape
    half = np.uint64(D // 2)
    while True:
        row0 = take(counter) * ROWS
        if row0 >= H * T:
            return
        for row in range(row0, min(row0 + ROWS, H * T)):
            h, t = np.uint64(row // T), np.uint64(row % T)
            for i in range(half):
                a, b = x_HTD[h, t, i], x_HTD[h, t, i + half]
                out_HTD[h, t, i] = a * cos_T2[t, i] - b * sin_T2[t, i]
                out_HTD[h, t, i + half] = b * cos_T2[t, i] + a * sin_T2[t, i]


@jit(exact=True)
def _swiglu(gate, up, out, counter):
    n = len(gate)
    while True:
        i0 = take(counter) * np.int64(8192)
        if i0 >= n:
            return
        swiglu_row(gate, up, out, i0, min(np.int64(8192), n - i0))


@jit(parallel=True)
def _rms_norm_parallel(x_TE, weight_E, eps, out_TE, counter, workers):
    for _ in numba.prange(workers):
        _rms_norm(x_TE, weight_E, eps, out_TE, counter)


@jit(parallel=True)
def _rope_parallel(x_HTD, cos_T2, sin_T2, out_HTD, counter, workers):
    for _ in numba.prange(workers):
        _rope(x_HTD, cos_T2, sin_T2, out_HTD, counter)


@jit(parallel=True)
def _swiglu_parallel(gate, up, out, counter, workers):
    for _ in numba.prange(workers):
        _swiglu(gate, up, out, counter)
