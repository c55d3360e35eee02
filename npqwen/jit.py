"""Numba's jit as the kernels use it: which float rules are relaxed, and where compiled code is kept.

Numba's cache looks at the file of a function alone, but compiled code holds its helpers and intrinsics too. One that was
edited since lives on in it; if its arguments have come to mean something else, it writes anywhere. So every state of the
sources has a folder of its own, named after all that goes into the machine code, times of change included; a process that
finds a source changed while it was importing them is ended, as it holds one half of each state; and one process at a time
writes, because Numba stores an entry as two files, and two processes could put their code under each other's names.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import llvmlite
import numba

# Sums may be reordered and fused. Never nnan or ninf: masks are -inf, and a NaN has to come out as one.
FASTMATH = {"reassoc", "contract", "arcp", "nsz"}

_HERE = Path(__file__).parent


def jit(*signature: Any, parallel: bool = False, exact: bool = False) -> Any:
    """numba.njit with a cache. exact: no reordering of float operations at all."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    options["fastmath"] = {"contract"} if exact else FASTMATH
    if parallel:
        options["parallel"] = True

    def decorate(function):
        folder = _cache_folder(Path(function.__code__.co_filename))
        config: Any = numba.config
        before = config.CACHE_DIR
        config.CACHE_DIR = folder or before
        try:
            kernel = numba.njit(*signature, **options | {"cache": folder is not None})(function)
        finally:
            config.CACHE_DIR = before
        return kernel if folder is None else _saved_alone(kernel, folder)

    return decorate


def _sources(file: Path) -> list[Path]:
    """All files that code compiled from this one may hold parts of."""
    return sorted({file, Path(__file__), *_HERE.glob("kernels*.py"), *file.parent.glob("kernels*.py")})


def _changed(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


_changed_first = {path: _changed(path) for path in _sources(Path(__file__))}  # before any kernel is imported
_states: dict[Path, str] = {}


def _cache_folder(file: Path) -> str | None:
    """A writable folder for this state of the sources. ImportError if they are not in the state that was imported."""
    try:
        sources = _sources(file)
        for path in sources:
            if _changed_first.setdefault(path, _changed(path)) != _changed(path):
                raise ImportError(f"{path} was edited while this process was importing the kernels: start it again")
        if file not in _states:
            state = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
            for path in sources:
                state.update(f"{path} {_changed_first[path]}".encode() + path.read_bytes())
            _states[file] = state.hexdigest()[:16]
        base = os.environ.get("NUMBA_CACHE_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "npqwen"
        )
        folder = os.path.join(base, f"kernels-{_states[file]}")
        os.makedirs(folder, exist_ok=True)
    except OSError:  # no such folder can be made, or the source is not a file: compiled anew in every process
        return None
    return folder if os.access(folder, os.W_OK) else None


def _saved_alone(kernel: Any, folder: str) -> Any:
    save = kernel._cache.save_overload

    def alone(signature, compiled):
        from filelock import FileLock

        with FileLock(os.path.join(folder, "lock")):
            save(signature, compiled)

    kernel._cache.save_overload = alone
    return kernel
