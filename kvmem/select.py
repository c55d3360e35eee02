"""Selectors: the full cache stays, and each query attends exactly to the few records that an index picks for it.

A selector differs from another in two things only: what it keeps beside the cache (its index, index.py) and which of the
best units by that index it uses. Every query of every query head chooses for itself; ties go to the lowest index.

Queries come as q_KRD, R of them for each kv head: all query heads of the group, one after another, and all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvmem.index import Index, Keys, PageBounds, ShortKeys, SignBits
from kvmem.reading import Region
from npqwen.attention import State
from npqwen.errors import UserError

# choose(q_KRD) -> record indices (K, R, k), int64; -1 is no record.
Choose = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Selected:
    """Exact attention over the records that `choose` picks. `index_bytes` is what the selector holds beside the cache."""

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
        q_KRD = np.ascontiguousarray(q_KGTD).reshape(K, G * T, D)
        out_KRD, lse_KR = self.ops.attend_chosen(q_KRD, self.k_KMD, self.v_KMD, self.choose(q_KRD), self.scale)
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
        ops, index = ops_for(region), Keys(region.k_KMD)
        return selected(region, lambda q_KRD: ops.best(index, q_KRD, self.k), index_bytes=0)

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
        ops, index = ops_for(region), SignBits.of(region.k_KMD)
        return selected(region, lambda q_KRD: ops.best(index, q_KRD, self.k), index.nbytes)

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
        ops, k_KMD = ops_for(region), region.k_KMD
        index = ShortKeys.of(k_KMD, principal(region)[:, :, : self.r])

        def choose(q_KRD: np.ndarray) -> np.ndarray:
            if not self.shortlist:
                return ops.best(index, q_KRD, self.k)
            return ops.recheck(q_KRD, k_KMD, ops.best(index, q_KRD, self.shortlist), self.k)

        return selected(region, choose, index.nbytes)

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
        ops, index, m = ops_for(region), PageBounds.of(region.k_KMD, self.page), region.n_records

        def choose(q_KRD: np.ndarray) -> np.ndarray:
            pages_KRn = ops.best(index, q_KRD, self.n_pages)
            records_KRnp = pages_KRn[..., None] * self.page + np.arange(self.page)
            records_KRk = records_KRnp.reshape(*q_KRD.shape[:2], self.n_pages * self.page)
            return np.where(records_KRk < m, records_KRk, -1)  # no record: the end of a short page

        return selected(region, choose, index.nbytes)

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

        def choose(q_KRD: np.ndarray) -> np.ndarray:
            return np.repeat(pick_KGk, q_KRD.shape[1] // config.group, axis=1)

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
    """The three steps of selection, each on all kv heads at once. NumPy here, Numba twins in kernels.py."""

    best: Callable[[Index, np.ndarray, int], np.ndarray]
    recheck: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
    attend_chosen: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray]]


def best(index: Index, q_KRD: np.ndarray, k: int) -> np.ndarray:
    """The k units that an index scores highest for each query, (K, R, k), int64, in index order."""
    return top(index.scores(q_KRD), k)


def top(score_KRM: np.ndarray, k: int) -> np.ndarray:
    """Indices (..., k), int64, of each row's k largest scores, in index order; of equal scores the lowest indices."""
    return np.sort(np.argsort(-score_KRM, axis=-1, kind="stable")[..., :k], axis=-1)


def recheck(q_KRD: np.ndarray, k_KMD: np.ndarray, short_KRc: np.ndarray, k: int) -> np.ndarray:
    """The k of each query's shortlist with the largest exact scores, (K, R, k)."""
    head_K11 = np.arange(len(q_KRD))[:, None, None]
    score_KRc = np.einsum("krd,krcd->krc", q_KRD, k_KMD[head_K11, short_KRc])
    return np.take_along_axis(short_KRc, top(score_KRc, k), axis=-1)


def attend_chosen(
    q_KRD: np.ndarray, k_KMD: np.ndarray, v_KMD: np.ndarray, chosen_KRk: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """State (out_KRD, lse_KR) of each query over its own records; an index of -1 is no record."""
    out_KRD, lse_KR = np.empty(q_KRD.shape, np.float32), np.empty(q_KRD.shape[:2], np.float32)
    head_K11 = np.arange(len(q_KRD))[:, None, None]
    for r in range(0, q_KRD.shape[1], 256):  # bounds the gathered records to 256 k D floats a head
        chosen = chosen_KRk[:, r : r + 256]
        score = np.einsum("krd,krcd->krc", q_KRD[:, r : r + 256], k_KMD[head_K11, chosen]) * np.float32(scale)
        score[chosen < 0] = -np.inf
        highest = score.max(axis=-1, keepdims=True)
        weight = np.exp(score - highest)
        total = weight.sum(axis=-1, keepdims=True)
        out_KRD[:, r : r + 256] = np.einsum("krc,krcd->krd", weight / total, v_KMD[head_K11, chosen])
        lse_KR[:, r : r + 256] = (highest + np.log(total))[..., 0]
    return out_KRD, lse_KR


NUMPY = Ops(best, recheck, attend_chosen)


def ops_for(region: Region) -> Ops:
    if not region.fast:
        return NUMPY
    from kvmem import kernels

    return Ops(kernels.best, kernels.recheck, kernels.attend_chosen)
