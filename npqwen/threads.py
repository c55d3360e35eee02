"""How many threads compute, set in one place: the compiled kernels' and the BLAS library's.

Kernels are written as workers that take items from a shared counter, so the number of threads never changes a result,
and one worker alone does the whole job: that is how they run in a forked child, where OpenMP would kill the process.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numba
from threadpoolctl import threadpool_limits

# Two Python threads in a parallel kernel at once abort under Numba's workqueue layer and share the cores twice under
# OpenMP; the kernels' scratch buffers are shared too. So: one kernel at a time.
lock = threading.RLock()

# Idle OpenMP threads spin so that the next kernel starts in 4 us instead of 20, by default for several milliseconds, in
# which NumPy's own BLAS threads find no core. This many rounds (about 0.1 ms) bridge the gap from kernel to kernel.
SPIN = "30000"

_config: Any = numba.config
_count = 0
_forked = False


def workers() -> int:
    """Threads that the next kernel uses; starts them on first use."""
    global _count
    if not _count:
        with lock:
            _start()
            _count = most()
    return 1 if _forked else _count


def most() -> int:
    """Threads that this process can use."""
    return int(_config.NUMBA_NUM_THREADS)


def set_threads(n: int) -> None:
    """Use n threads from now on, in kernels and in NumPy's BLAS."""
    global _count
    if not 1 <= n <= most():
        raise ValueError(f"{n} threads: this process can use 1 to {most()}")
    workers()
    with lock:
        _count = n
        threadpool_limits(n, user_api="blas")


def _start() -> None:
    spin_is_ours = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if spin_is_ours:
        os.environ["GOMP_SPINCOUNT"] = SPIN
    try:
        numba.set_num_threads(most())  # loads the threading layer, which reads the environment
    finally:
        if spin_is_ours:
            del os.environ["GOMP_SPINCOUNT"]


def _after_fork() -> None:
    global lock, _forked
    lock = threading.RLock()  # the parent's may have been held by a thread that does not exist here
    _forked = _count > 0


os.register_at_fork(after_in_child=_after_fork)
