"""Selectors: the full cache stays, and each query attends exactly to the few records that an index picks for it.

A selector differs from another in two things only: what it keeps beside the cache (its index) and how it scores records
with it. Every query of every query head chooses for itself; ties go to the lowest index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvmem.reading import Region
from npqwen.attention import State
from npqwen.errors import UserError

# choose(head, q_RD) -> record indices (R, k) for R queries that read this kv head.
Choose = Callable[[int, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Selected:
    """Exact attention over the records that `choose` picks. `index_bytes` is what the selector keeps beside the cache."""

    k_KMD: np.ndarray
    v_KMD: np.ndarray
    scale: float
    choose: Choose
    index_bytes: int
    ops: Ops = field(repr=False)

    @property
    def stored_bytes(self) -> int:
        return self.k_KMD.nbytes + self.v_KMD.nbytes + self.index_bytes

    def state(self, q_KGTD: np.ndarray) -> State:
        K, G, T, D = q_KGTD.shape
        out_KRD, lse_KR = np.empty((K, G * T, D), np.float32), np.empty((K, G * T), np.float32)
        for head in range(K):
            q_RD = np.ascontiguousarray(q_KGTD[head].reshape(G * T, D))
            chosen_Rk = self.choose(head, q_RD)
            out_KRD[head], lse_KR[head] = self.ops.attend_chosen(
                q_RD, self.k_KMD[head], self.v_KMD[head], chosen_Rk, self.scale
            )
        return State(out_KRD.reshape(K, G, T, D), lse_KR.reshape(K, G, T))


@dataclass(frozen=True)
class Exact:
    """The k records with the largest true scores: no index, reads every key."""

    k: int

    def __str__(self) -> str:
        return f"exact:{self.k}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_count(self, self.k, n_records)

    def build(self, region: Region) -> Selected:
        ops, linear, k_KMD = ops_for(region), region.linear, region.k_KMD
        return selected(region, lambda head, q_RD: ops.top(linear(q_RD, k_KMD[head]), self.k), index_bytes=0)

    def reads(self, n_records: int, head_dim: int) -> float:
        return 1 / 2 + self.k / (2 * n_records)


@dataclass(frozen=True)
class Sign:
    """Scores q . sign(k): the keys' index is 1 bit a dimension, the query keeps its full precision."""

    k: int

    def __str__(self) -> str:
        return f"sign:{self.k}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_count(self, self.k, n_records)

    def build(self, region: Region) -> Selected:
        ops, linear = ops_for(region), region.linear
        sign_KMD = np.where(region.k_KMD < 0, np.float32(-1), np.float32(1))
        packed_bytes = sign_KMD.size // 8
        return selected(region, lambda head, q_RD: ops.top(linear(q_RD, sign_KMD[head]), self.k), packed_bytes)

    def reads(self, n_records: int, head_dim: int) -> float:
        return 1 / (2 * 32) + self.k / n_records


@dataclass(frozen=True)
class LowRank:
    """Scores in the top r right singular vectors P of the region's keys, (qP).(kP); `shortlist` 0 means no re-check.

    With a shortlist its records are scored again with their full keys, and the best k of them are used: the re-check is
    what makes a cheap index accurate (near relative: ShadowKV, arXiv 2410.21465).
    """

    r: int
    k: int
    shortlist: int = 0

    def __str__(self) -> str:
        return f"lowrank{self.r}:{self.shortlist}:{self.k}" if self.shortlist else f"lowrank{self.r}:{self.k}"

    def check(self, n_records: int, head_dim: int) -> None:
        if self.r > head_dim:
            raise UserError(f"{self}: rank {self.r} exceeds head_dim {head_dim}")
        if self.shortlist and self.shortlist < self.k:
            raise UserError(f"{self}: a shortlist of {self.shortlist} cannot hold {self.k} records")
        check_count(self, max(self.k, self.shortlist), n_records)

    def build(self, region: Region) -> Selected:
        ops, linear, k_KMD = ops_for(region), region.linear, region.k_KMD
        p_KDR = principal(region)[:, :, : self.r]
        p_KRD = np.ascontiguousarray(p_KDR.swapaxes(1, 2))
        short_KMR = np.stack([linear(k_MD, p_RD) for k_MD, p_RD in zip(k_KMD, p_KRD, strict=True)])

        def choose(head: int, q_RD: np.ndarray) -> np.ndarray:
            rough_RM = linear(linear(q_RD, p_KRD[head]), short_KMR[head])
            if not self.shortlist:
                return ops.top(rough_RM, self.k)
            return ops.recheck(q_RD, k_KMD[head], ops.top(rough_RM, self.shortlist), self.k)

        return selected(region, choose, p_KRD.nbytes + short_KMR.nbytes)

    def reads(self, n_records: int, head_dim: int) -> float:
        recheck = self.shortlist / (2 * n_records)
        used = self.k / (2 * n_records) if self.shortlist else self.k / n_records  # re-checked keys are read already
        return self.r / (2 * head_dim) + recheck + used


@dataclass(frozen=True)
class Quest:
    """Pages of `page` records scored by an upper bound, sum_d max(q_d min_d, q_d max_d); all records of the best pages.

    A last page may be short; its records are used like any other. Source: Quest, arXiv 2406.10774, section 3.2.
    """

    page: int
    n_pages: int

    def __str__(self) -> str:
        return f"quest{self.page}:{self.n_pages}"

    def check(self, n_records: int, head_dim: int) -> None:
        available = -(-n_records // self.page)
        if self.n_pages > available:
            raise UserError(f"{self}: {n_records} records make {available} pages of {self.page}, not {self.n_pages}")

    def build(self, region: Region) -> Selected:
        ops, linear, k_KMD = ops_for(region), region.linear, region.k_KMD
        m = region.n_records
        starts = np.arange(0, m, self.page)
        low_KPD = np.minimum.reduceat(k_KMD, starts, axis=1)
        high_KPD = np.maximum.reduceat(k_KMD, starts, axis=1)

        def choose(head: int, q_RD: np.ndarray) -> np.ndarray:
            positive = np.maximum(q_RD, np.float32(0))
            bound_RP = linear(positive, high_KPD[head]) + linear(q_RD - positive, low_KPD[head])
            best_RP = ops.top(bound_RP, self.n_pages)
            records = (best_RP[:, :, None] * self.page + np.arange(self.page)).reshape(
                len(q_RD), self.n_pages * self.page
            )
            return np.where(records < m, records, -1)  # -1: no record, the end of a short page

        return selected(region, choose, low_KPD.nbytes + high_KPD.nbytes)

    def reads(self, n_records: int, head_dim: int) -> float:
        return 1 / self.page + min(self.page * self.n_pages, n_records) / n_records


@dataclass(frozen=True)
class RandomPick:
    """k records drawn once per query head from the seed, the same for every query: a floor for selectors.

    Drawn per head and not per query, so that an answer depends neither on its batch nor on rounding.
    """

    k: int

    def __str__(self) -> str:
        return f"random:{self.k}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_count(self, self.k, n_records)

    def build(self, region: Region) -> Selected:
        config = region.reading.model.config
        rng = region.rng("pick")
        pick_Hk = np.stack([rng.choice(region.n_records, self.k, replace=False) for _ in range(config.n_heads)])
        pick_KGk = pick_Hk.reshape(config.n_kv_heads, config.group, self.k)

        def choose(head: int, q_RD: np.ndarray) -> np.ndarray:
            return np.repeat(pick_KGk[head], len(q_RD) // config.group, axis=0)

        return selected(region, choose, pick_Hk.size * 4)

    def reads(self, n_records: int, head_dim: int) -> float:
        return self.k / n_records


def selected(region: Region, choose: Choose, index_bytes: int) -> Selected:
    return Selected(region.k_KMD, region.v_KMD, region.scale, choose, index_bytes, ops_for(region))


def principal(region: Region) -> np.ndarray:
    """Right singular vectors of each kv head's keys, largest first, float32 (K, D, D): eigenvectors of K'K, float64."""

    def compute() -> np.ndarray:
        k_KMD = region.k_KMD.astype(np.float64)
        _, vectors = np.linalg.eigh(k_KMD.swapaxes(1, 2) @ k_KMD)
        return np.ascontiguousarray(vectors[:, :, ::-1]).astype(np.float32)

    return region.reading.derived(("principal", region.layer, region.settings.n_sinks), compute)


def check_count(arm: object, k: int, n_records: int) -> None:
    if k > n_records:
        raise UserError(f"{arm}: {k} records asked for, the text has {n_records} after its sinks")


@dataclass(frozen=True)
class Ops:
    """The three steps of selection on R queries of one kv head. NumPy here, Numba twins in kernels.py."""

    top: Callable[[np.ndarray, int], np.ndarray]
    recheck: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
    attend_chosen: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray]]


def top(score_RM: np.ndarray, k: int) -> np.ndarray:
    """Indices (R, k), int64, of each row's k largest scores, in index order; of equal scores the lowest indices."""
    return np.sort(np.argsort(-score_RM, axis=1, kind="stable")[:, :k], axis=1)


def recheck(q_RD: np.ndarray, k_MD: np.ndarray, short_Rc: np.ndarray, k: int) -> np.ndarray:
    """The k of each query's shortlist with the largest exact scores, (R, k)."""
    score_Rc = np.einsum("rd,rcd->rc", q_RD, k_MD[short_Rc])
    return np.take_along_axis(short_Rc, top(score_Rc, k), axis=1)


def attend_chosen(
    q_RD: np.ndarray, k_MD: np.ndarray, v_MD: np.ndarray, chosen_Rk: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """State (out_RD, lse_R) of each query over its own records; an index of -1 is no record."""
    out_RD, lse_R = np.empty((len(q_RD), v_MD.shape[1]), np.float32), np.empty(len(q_RD), np.float32)
    for r in range(0, len(q_RD), 256):  # bounds the gathered records to 256 k D floats
        chosen = chosen_Rk[r : r + 256]
        score = np.einsum("rd,rkd->rk", q_RD[r : r + 256], k_MD[chosen]) * np.float32(scale)
        score[chosen < 0] = -np.inf
        highest = score.max(axis=1, keepdims=True)
        weight = np.exp(score - highest)
        total = weight.sum(axis=1, keepdims=True)
        out_RD[r : r + 256] = np.einsum("rk,rkd->rd", weight / total, v_MD[chosen])
        lse_R[r : r + 256] = (highest + np.log(total))[:, 0]
    return out_RD, lse_R


NUMPY = Ops(top, recheck, attend_chosen)


def ops_for(region: Region) -> Ops:
    if not region.fast:
        return NUMPY
    from kvmem import kernels

    return Ops(kernels.top, kernels.recheck, kernels.attend_chosen)
