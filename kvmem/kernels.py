"""Numba twins of select.py's three steps. A worker takes a run of queries; no query's result depends on another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import prange

from npqwen import threads
from npqwen.jit import jit


def top(score_RM: np.ndarray, k: int) -> np.ndarray:
    """Indices (R, k), int64, of each row's k largest scores, in index order; of equal scores the lowest indices."""
    out_Rk = np.empty((len(score_RM), k), np.int64)
    _run(_top_rows, _top, np.ascontiguousarray(score_RM), out_Rk)
    return out_Rk


def recheck(q_RD: np.ndarray, k_MD: np.ndarray, short_Rc: np.ndarray, k: int) -> np.ndarray:
    """The k of each query's shortlist with the largest exact scores, (R, k)."""
    out_Rk = np.empty((len(q_RD), k), np.int64)
    _run(_recheck_rows, _recheck, q_RD, k_MD, short_Rc, out_Rk)
    return out_Rk


def attend_chosen(
    q_RD: np.ndarray, k_MD: np.ndarray, v_MD: np.ndarray, chosen_Rk: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """State (out_RD, lse_R) of each query over its own records; an index of -1 is no record."""
    out_RD, lse_R = np.empty((len(q_RD), v_MD.shape[1]), np.float32), np.empty(len(q_RD), np.float32)
    _run(_attend_rows, _attend_chosen, q_RD, k_MD, v_MD, chosen_Rk, np.float32(scale), out_RD, lse_R)
    return out_RD, lse_R


def _run(rows: Callable[..., None], parallel: Callable[..., None], *arrays: Any) -> None:
    """One kernel at a time; `parallel` gives each worker an equal run of rows, one worker takes them all itself."""
    with threads.lock:
        workers = threads.workers()
        if workers == 1:
            rows(0, 1, *arrays)
        else:
            parallel(workers, *arrays)


LANES = 16


@jit(exact=True)
def _dot(q_RD, r, k_MD, m, lane):
    """q_r . k_m in LANES sums that meet at the end: they fill a vector register, and their order is fixed.

    Left free to reorder, the compiler chooses another order for one thread than for two.
    """
    D = q_RD.shape[1]
    lane[:] = 0
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        for i in range(LANES):
            lane[i] += q_RD[r, d + i] * k_MD[m, d + i]
    for d in range(whole, D):
        lane[d - whole] += q_RD[r, d] * k_MD[m, d]
    total = np.float32(0)
    for i in range(LANES):
        total += lane[i]
    return total


@jit(exact=True)
def _insert(value, index, values, indices, filled):
    """Puts (value, index) into the descending list; an equal value that came before stays before."""
    at = min(filled, len(values) - 1)
    while at > 0 and values[at - 1] < value:
        values[at] = values[at - 1]
        indices[at] = indices[at - 1]
        at -= 1
    values[at] = value
    indices[at] = index


@jit(exact=True)
def _top_rows(part, parts, score_RM, out_Rk):
    R, M = score_RM.shape
    k = out_Rk.shape[1]
    values = np.empty(k, np.float32)
    indices = np.empty(k, np.int64)
    for r in range(part * R // parts, (part + 1) * R // parts):
        for m in range(k):
            _insert(score_RM[r, m], m, values, indices, m)
        lowest = values[k - 1]
        for m in range(k, M):
            if score_RM[r, m] > lowest:
                _insert(score_RM[r, m], m, values, indices, k)
                lowest = values[k - 1]
        out_Rk[r] = np.sort(indices)


@jit(exact=True)
def _recheck_rows(part, parts, q_RD, k_MD, short_Rc, out_Rk):
    R, k, c = len(q_RD), out_Rk.shape[1], short_Rc.shape[1]
    lane = np.empty(LANES, np.float32)
    values = np.empty(k, np.float32)
    indices = np.empty(k, np.int64)
    for r in range(part * R // parts, (part + 1) * R // parts):
        for i in range(c):
            m = short_Rc[r, i]
            score = _dot(q_RD, r, k_MD, m, lane)
            if i < k or score > values[k - 1]:
                _insert(score, m, values, indices, min(i, k))
        out_Rk[r] = np.sort(indices)


@jit(exact=True)
def _attend_rows(part, parts, q_RD, k_MD, v_MD, chosen_Rk, scale, out_RD, lse_R):
    R, k = chosen_Rk.shape
    lane = np.empty(LANES, np.float32)
    weight = np.empty(k, np.float32)
    for r in range(part * R // parts, (part + 1) * R // parts):
        highest = np.float32(-np.inf)
        for i in range(k):
            m = chosen_Rk[r, i]
            weight[i] = _dot(q_RD, r, k_MD, m, lane) * scale if m >= 0 else np.float32(-np.inf)
            highest = max(highest, weight[i])
        total = np.float32(0)
        for i in range(k):
            weight[i] = np.exp(weight[i] - highest)
            total += weight[i]
        out_RD[r] = 0
        for i in range(k):
            m = chosen_Rk[r, i]
            if m >= 0:
                share = weight[i] / total
                for d in range(out_RD.shape[1]):
                    out_RD[r, d] += share * v_MD[m, d]
        lse_R[r] = highest + np.log(total)


@jit(parallel=True, exact=True)
def _top(parts, score_RM, out_Rk):
    for part in prange(parts):
        _top_rows(part, parts, score_RM, out_Rk)


@jit(parallel=True, exact=True)
def _recheck(parts, q_RD, k_MD, short_Rc, out_Rk):
    for part in prange(parts):
        _recheck_rows(part, parts, q_RD, k_MD, short_Rc, out_Rk)


@jit(parallel=True, exact=True)
def _attend_chosen(parts, q_RD, k_MD, v_MD, chosen_Rk, scale, out_RD, lse_R):
    for part in prange(parts):
        _attend_rows(part, parts, q_RD, k_MD, v_MD, chosen_Rk, scale, out_RD, lse_R)
