"""The parts of a layer that look at one token at a time, in plain NumPy. Activations are float32 throughout."""

from __future__ import annotations

import numpy as np

from npqwen.config import Config
from npqwen.weights import widen

TILE = 1024  # rows of a bf16 matrix widened at a time: no float32 copy of the model ever exists


def embed(w_VE: np.ndarray, ids_T: np.ndarray) -> np.ndarray:
    """float32 (T, E): one row of the embedding per id."""
    return widen(w_VE[ids_T])


def linear(x_TE: np.ndarray, w_NE: np.ndarray) -> np.ndarray:
    """x w^T, float32 (T, N), for a matrix as stored: bf16 bits, f16 or f32."""
    if w_NE.dtype == np.float32:
        return x_TE @ w_NE.T
    out_TN = np.empty((len(x_TE), len(w_NE)), np.float32)
    for row in range(0, len(w_NE), TILE):
        out_TN[:, row : row + TILE] = x_TE @ widen(w_NE[row : row + TILE]).T
    return out_TN


def linears(x_TE: np.ndarray, *w_NE: np.ndarray) -> list[np.ndarray]:
    """x w^T for each of several matrices with one input."""
    return [linear(x_TE, w) for w in w_NE]


def rms_norm(x_TE: np.ndarray, weight_E: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. eps stands inside the root: for small x it matters."""
    mean_square = np.mean(x_TE * x_TE, axis=-1, keepdims=True, dtype=np.float32)
    return x_TE / np.sqrt(mean_square + np.float32(eps)) * weight_E


def swiglu(gate_TF: np.ndarray, up_TF: np.ndarray) -> np.ndarray:
    """silu(gate) * up. exp only ever sees -|gate|, so it cannot overflow."""
    small = np.exp(-np.abs(gate_TF))
    return gate_TF * np.where(gate_TF >= 0, np.float32(1), small) / (1 + small) * up_TF


def rotation(config: Config, positions_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of every position's angles, float32 (T, D/2) each.

    Angles are float64: the integers above 256 do not exist in bf16, and a float32 angle is off by up to 1.6e-3 at
    position 40,000. YaRN's temperature is a factor on both tables.
    """
    angles = np.asarray(positions_T, np.float64)[:, None] * config.rope.inv_freq(config.head_dim)
    factor = config.rope.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def rope(x_HTD: np.ndarray, cos_T2: np.ndarray, sin_T2: np.ndarray) -> np.ndarray:
    """Channel pair (i, i + D/2) of every head turned by its position's angle i.

    The pairs are *half split*: Qwen checkpoints are stored for it. Pairing neighbours (2i, 2i + 1), as the RoPE paper
    writes it (arXiv 2104.09864), is the same rotation of other channels, and gives fluent nonsense here.
    """
    half = x_HTD.shape[-1] // 2
    a, b = x_HTD[..., :half], x_HTD[..., half:]
    return np.concatenate([a * cos_T2 - b * sin_T2, b * cos_T2 + a * sin_T2], axis=-1)
