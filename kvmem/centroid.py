"""centroid/f: the keys in C clusters, each answering for its members with a mean key, a count and a mean value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvmem.reading import Region
from kvmem.records import check_share
from npqwen.attention import State

LLOYD_STEPS = 25  # at most; clusters of keys settle in 10 to 20


@dataclass(frozen=True)
class Clusters:
    """Mean keys c_KCD, log counts (K, C) and one value w_KCD a cluster: softmax over scale q.c_j + ln n_j.

    The mass is biased low: the mean of e^s over a cluster is at least e^(mean s) (Jensen), so lse never exceeds the exact.
    """

    c_KCD: np.ndarray
    log_count_KC: np.ndarray
    w_KCD: np.ndarray
    scale: float
    attend: Callable[..., State]

    @property
    def stored_bytes(self) -> int:
        return self.c_KCD.nbytes + self.log_count_KC.nbytes + self.w_KCD.nbytes

    def state(self, q_KGTD: np.ndarray) -> State:
        return self.attend(q_KGTD, self.c_KCD, self.w_KCD, scale=self.scale, log_weight_KS=self.log_count_KC)


@dataclass(frozen=True)
class Centroid:
    """Clusters with the mean value of their members. Budget: key, value and count, 2D + 1 floats a cluster."""

    f: int

    def __str__(self) -> str:
        return f"centroid/{self.f}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_share(self, n_clusters(n_records, head_dim, self.f), "clusters", n_records)

    def build(self, region: Region) -> Clusters:
        return clusters(region, self.f)

    def reads(self, n_records: int, head_dim: int) -> float:
        return n_clusters(n_records, head_dim, self.f) * (2 * head_dim + 1) / (n_records * 2 * head_dim)


def n_clusters(n_records: int, head_dim: int, f: int) -> int:
    return n_records * 2 * head_dim // f // (2 * head_dim + 1)


def clusters(region: Region, f: int) -> Clusters:
    """k-means of each kv head's keys. An emptied cluster keeps its slot with log count -inf: it answers no query."""
    key = ("clusters", region.layer, region.seed, region.settings.n_sinks, f)
    return region.reading.derived(key, lambda: _cluster(region, f))


def _cluster(region: Region, f: int) -> Clusters:
    K, m, D = region.k_KMD.shape
    C = n_clusters(m, D, f)
    c_KCD, w_KCD = np.empty((K, C, D), np.float32), np.zeros((K, C, D), np.float32)
    log_count_KC = np.full((K, C), -np.inf, np.float32)
    rng = region.rng(f"kmeans{f}")
    for head in range(K):
        c_KCD[head], label_M = kmeans(region.k_KMD[head], C, rng)
        filled, value_sum, count = sum_by_label(region.v_KMD[head], label_M)
        w_KCD[head, filled] = value_sum / count[:, None]
        log_count_KC[head, filled] = np.log(count)
    return Clusters(c_KCD, log_count_KC, w_KCD, region.scale, region.attend)


def kmeans(x_MD: np.ndarray, C: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Centres (C, D) float32 and the nearest centre of every row, int64 (M,). Lloyd's steps from a k-means++ start.

    Source: Arthur and Vassilvitskii, k-means++, SODA 2007.
    """
    c_CD = plus_plus(x_MD, C, rng)
    label_M = nearest(x_MD, c_CD)
    for _ in range(LLOYD_STEPS):
        filled, total, count = sum_by_label(x_MD, label_M)
        c_CD[filled] = total / count[:, None]
        previous, label_M = label_M, nearest(x_MD, c_CD)
        if np.array_equal(previous, label_M):
            break
    filled, total, count = sum_by_label(x_MD, label_M)
    c_CD[filled] = total / count[:, None]
    return c_CD, label_M


def plus_plus(x_MD: np.ndarray, C: int, rng: np.random.Generator) -> np.ndarray:
    """C different rows as first centres, each drawn with the square of its distance to the nearest one before it."""
    square_M = np.einsum("md,md->m", x_MD, x_MD)
    chosen = [int(rng.integers(len(x_MD)))]
    distance_M = np.full(len(x_MD), np.inf)
    while len(chosen) < C:
        last = chosen[-1]
        distance_M = np.minimum(distance_M, np.maximum(square_M + square_M[last] - 2 * (x_MD @ x_MD[last]), 0))
        distance_M[last] = 0
        cumulative = np.cumsum(distance_M)
        if cumulative[-1] > 0:
            chosen.append(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")))
        else:  # fewer different rows than centres: the rest repeat, and end up empty
            chosen.append(int(rng.integers(len(x_MD))))
    return x_MD[chosen].astype(np.float32)


def nearest(x_MD: np.ndarray, c_CD: np.ndarray) -> np.ndarray:
    """Index of the nearest centre of each row; ties to the lowest."""
    half_square_C = 0.5 * np.einsum("cd,cd->c", c_CD, c_CD)
    return np.argmax(x_MD @ c_CD.T - half_square_C, axis=1)


def sum_by_label(x_MD: np.ndarray, label_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The labels that occur, the sum of their rows (float64) and how many rows each has."""
    order = np.argsort(label_M, kind="stable")
    filled, first, count = np.unique(label_M[order], return_index=True, return_counts=True)
    return filled, np.add.reduceat(x_MD[order].astype(np.float64), first, axis=0), count
