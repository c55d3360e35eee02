"""Qwen3 as plain NumPy and Numba arrays.

Letters that name the axes of arrays, here and everywhere: T new tokens, S stored keys, E hidden, H query heads,
K kv heads, G query heads per kv head, D head_dim, F mlp width, V vocabulary, B batch rows, L layers;
in kvmem also C centroids, R rank, P pages.
"""

from npqwen.errors import UserError
from npqwen.generate import generate, generate_batch
from npqwen.model import Model, load, logits

__all__ = ["Model", "UserError", "generate", "generate_batch", "load", "logits"]
