"""Qwen3 as plain NumPy and Numba arrays.

Letters that name the axes of arrays, here and everywhere: T new tokens, S stored keys, E hidden, H query heads,
K kv heads, G query heads per kv head, D head_dim, F mlp width, V vocabulary, B batch rows, L layers;
in kvmem also C centroids, R rank, P pages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npqwen.errors import UserError
    from npqwen.generation import generate, generate_batch
    from npqwen.model import Model, load, logits

__all__ = ["Model", "UserError", "generate", "generate_batch", "load", "logits"]

_HOME = {"UserError": "errors", "generate": "generation", "generate_batch": "generation"}


def __getattr__(name: str) -> Any:
    """The public names, imported on first use: who only reads rows or asks for help loads no model code."""
    if name not in __all__:
        raise AttributeError(f"module 'npqwen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"npqwen.{_HOME.get(name, 'model')}"), name)
