"""Numba's jit as the kernels use it: which float rules are relaxed, and where compiled code is kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba

# Sums may be reordered and fused. Never nnan or ninf: masks are -inf, and a NaN has to come out as one.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


def _cache_folder() -> str | None:
    """A folder of its own for every state of the kernel sources: Numba itself does not notice an edited helper."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("kernels*.py")), Path(__file__)]
    state = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "npqwen"
    )
    folder = os.path.join(base, f"kernels-{state}")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _cache_folder()


def jit(*signature: Any, parallel: bool = False, exact: bool = False) -> Any:
    """numba.njit with a cache. exact: no reordering of float operations at all."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": _FOLDER is not None}
    options["fastmath"] = {"contract"} if exact else FASTMATH
    if parallel:
        options["parallel"] = True

    def decorate(function):
        config: Any = numba.config
        before = config.CACHE_DIR
        config.CACHE_DIR = _FOLDER or before
        try:
            return numba.njit(*signature, **options)(function)
        finally:
            config.CACHE_DIR = before

    return decorate
