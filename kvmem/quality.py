"""How well a part did on given queries: what its selection found, and how far its mass is off."""

from __future__ import annotations

import numpy as np

from kvmem.index import Keys
from kvmem.memory import Memory
from kvmem.mix import Mixed
from kvmem.select import Selected
from npqwen.attention import grouped


def selection(memory: Memory, layer: int, q_HTD: np.ndarray, best: int = 8) -> dict[str, float] | None:
    """Means over all queries of a layer: the share of the true `best` records that the selector found, the share of the
    true attention mass on its records, and the number of different records that one token reads per kv head.

    None for an arm without a selector. q_HTD rotated.
    """
    part = memory.parts[layer]
    part = part.selected if isinstance(part, Mixed) else part
    if not isinstance(part, Selected):
        return None
    q_KGTD = grouped(q_HTD, memory.reading.model.config.n_kv_heads)
    K, G, T, D = q_KGTD.shape
    best = min(best, part.k_KMD.shape[1])
    q_KRD = np.ascontiguousarray(q_KGTD).reshape(K, G * T, D)
    chosen_KRk, true_KRb = part.choose(q_KRD), part.ops.best(Keys(part.k_KMD), q_KRD, best)
    found, mass, unique = [], [], []
    for head in range(K):
        chosen_Rk = chosen_KRk[head]
        score_RM = q_KRD[head] @ part.k_KMD[head].T * np.float32(part.scale)
        picked_RM = np.zeros(score_RM.shape, bool)
        row_R1 = np.arange(G * T)[:, None]
        picked_RM[np.broadcast_to(row_R1, chosen_Rk.shape)[chosen_Rk >= 0], chosen_Rk[chosen_Rk >= 0]] = True
        found.append(picked_RM[row_R1, true_KRb[head]].mean())
        weight_RM = np.exp(score_RM - score_RM.max(axis=1, keepdims=True))
        mass.append(((weight_RM * picked_RM).sum(axis=1) / weight_RM.sum(axis=1)).mean())
        unique.append(picked_RM.reshape(G, T, -1).any(axis=0).sum(axis=1).mean())
    return {
        "top8_share": float(np.mean(found)),
        "mass_share": float(np.mean(mass)),
        "unique_records": float(np.mean(unique)),
    }


def lse_error(memory: Memory, layer: int, q_HTD: np.ndarray) -> float | None:
    """Mean of the part's lse minus the exact lse over the text after the sinks; None for an arm that keeps nothing."""
    reading, n_sinks = memory.reading, memory.settings.n_sinks
    q_KGTD = grouped(q_HTD, reading.model.config.n_kv_heads)
    lse = memory.parts[layer].state(q_KGTD).lse
    if np.isneginf(lse).any():
        return None
    k_KMD, v_KMD = reading.k[layer][:, n_sinks:], reading.v[layer][:, n_sinks:]
    exact = reading.model.ops.attend(q_KGTD, k_KMD, v_KMD, scale=reading.model.config.scale)
    return float(np.mean(lse - exact.lse))
