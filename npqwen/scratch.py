"""Buffers that kernels write to and nobody reads afterwards: allocated once, used under threads.lock."""

from __future__ import annotations

import numpy as np

_buffers: dict[str, np.ndarray] = {}


def scratch(name: str, n: int) -> np.ndarray:
    """n float32 of any content, aligned to 64 bytes. The buffer grows when it has to and stays."""
    buffer = _buffers.get(name)
    if buffer is None or len(buffer) < n:
        raw = np.empty(n + 16, np.float32)
        start = (-raw.ctypes.data % 64) // 4
        buffer = _buffers[name] = raw[start : start + n]
    return buffer[:n]
