"""ffit/f and frand/f: a small function of the query, its values fitted in one closed form to the exact attention.

    phi(q) = softmax of scores against C anchors;   o(q) = phi W;   W = argmin |Phi W - O|^2 + lambda |W - W0|^2

over simulated future queries (Region.future). ffit's anchors are the k-means centres of the keys, frand's are random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from kvmem.centroid import Centroid, Clusters, clusters
from kvmem.reading import Region
from kvmem.records import check_share
from npqwen.attention import State


@dataclass(frozen=True)
class Ffit(Centroid):
    """centroid/f with fitted values: the same keys, counts, lse and budget, W pulled towards the clusters' means."""

    def __str__(self) -> str:
        return f"ffit/{self.f}"

    def build(self, region: Region) -> Clusters:
        key = ("ffit", region.layer, region.seed, region.settings, self.f)
        return region.reading.derived(key, lambda: self._fit(region))

    def _fit(self, region: Region) -> Clusters:
        start = clusters(region, self.f)
        q_KND, exact = region.future()
        w_KCD = np.empty_like(start.w_KCD)
        for head in range(len(w_KCD)):
            score_NC = q_KND[head] @ start.c_KCD[head].T * np.float32(region.scale) + start.log_count_KC[head]
            phi_NC, _ = softmax(score_NC)
            w_KCD[head] = ridge(phi_NC, exact.out[head], start.w_KCD[head], region.settings.ridge)
        return replace(start, w_KCD=w_KCD)


@dataclass(frozen=True)
class RandomFeatures:
    """frand's part. The anchors a_KCD are redrawn from the seed; stored are one scale a head and values_KCX, whose
    columns are W (D of them) and then beta: phi W and phi.beta come out of one softmax."""

    a_KCD: np.ndarray
    values_KCX: np.ndarray
    scale: float
    attend: Callable[..., State]

    @property
    def stored_bytes(self) -> int:
        return self.values_KCX.nbytes + 4 * len(self.a_KCD)

    def state(self, q_KGTD: np.ndarray) -> State:
        out, lse = self.attend(q_KGTD, self.a_KCD, self.values_KCX, scale=self.scale)
        return State(np.ascontiguousarray(out[..., :-1]), lse + out[..., -1])


@dataclass(frozen=True)
class Frand:
    """Random anchors with fitted values and a fitted log-mass term each; stores no keys.

    Budget: D + 1 floats an anchor and one for the scale, so C = floor((budget - 1) / (D + 1)). The anchors are Gaussian
    with the root mean square norm of the region's keys.
    """

    f: int

    def __str__(self) -> str:
        return f"frand/{self.f}"

    def n_anchors(self, n_records: int, head_dim: int) -> int:
        return (n_records * 2 * head_dim // self.f - 1) // (head_dim + 1)

    def check(self, n_records: int, head_dim: int) -> None:
        check_share(self, self.n_anchors(n_records, head_dim), "anchors", n_records)

    def build(self, region: Region) -> RandomFeatures:
        K, m, D = region.k_KMD.shape
        C, rng = self.n_anchors(m, D), region.rng("frand")
        q_KND, exact = region.future()
        a_KCD, values_KCX = np.empty((K, C, D), np.float32), np.empty((K, C, D + 1), np.float32)
        for head in range(K):
            rms_norm = np.sqrt(np.mean(np.sum(region.k_KMD[head] ** 2, axis=1)))
            a_KCD[head] = rng.standard_normal((C, D), np.float32) * (rms_norm / np.float32(D**0.5))
            phi_NC, mass_N = softmax(q_KND[head] @ a_KCD[head].T * np.float32(region.scale))
            target_NX = np.column_stack([exact.out[head], exact.lse[head] - mass_N])
            values_KCX[head] = ridge(phi_NC, target_NX, np.zeros((C, D + 1)), region.settings.ridge)
        return RandomFeatures(a_KCD, values_KCX, region.scale, region.attend)

    def reads(self, n_records: int, head_dim: int) -> float:
        return (self.n_anchors(n_records, head_dim) * (head_dim + 1) + 1) / (n_records * 2 * head_dim)


def softmax(score_NC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of weights that sum to 1, and the rows' logsumexp, float64, as the solve needs them, of float32 exponentials."""
    top_N1 = score_NC.max(axis=1, keepdims=True)
    weight_NC = np.exp(score_NC - top_N1).astype(np.float64)
    total_N1 = weight_NC.sum(axis=1, keepdims=True)
    weight_NC /= total_N1
    return weight_NC, (top_N1 + np.log(total_N1))[:, 0]


def ridge(phi_NC: np.ndarray, target_NX: np.ndarray, prior_CX: np.ndarray, strength: float) -> np.ndarray:
    """argmin_W |Phi W - target|^2 + lambda |W - prior|^2, lambda = strength * trace(Phi'Phi) / C. float64 Cholesky."""
    gram_CC = phi_NC.T @ phi_NC
    C = len(gram_CC)
    ridge_lambda = strength * np.trace(gram_CC) / C
    gram_CC[np.arange(C), np.arange(C)] += ridge_lambda
    return cho_solve(cho_factor(gram_CC), phi_NC.T @ target_NX + ridge_lambda * prior_CX)
