"""Runs every kernel with each of its arrays between two pages that nobody may touch: a stray access ends the process.

A program of its own (test_kernels starts it), since what it looks for would end the tests as well.
"""

import ctypes
import mmap
import sys

import numpy as np

from kvmem import kernels as selection
from kvmem import select
from kvmem.index import Keys, PageBounds, ShortKeys, SignBits
from npqwen import attention, kernels, kernels_attend, kernels_linear, kernels_pointwise, kernels_tiles, layers, threads

protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
EMPTY, EMPTY_LIKE = np.empty, np.empty_like
SIZES = (1, 7, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129)


class Fence:
    """Arrays whose last byte (or first, if not at_end) lies at a closed page; `skew` bytes off it, for unaligned ones."""

    def __init__(self, at_end):
        self.at_end = at_end

    def empty(self, shape, dtype=np.float64, skew=0):
        dtype = np.dtype(dtype)
        n = int(np.prod(shape)) * dtype.itemsize + skew
        pages = -(-n // mmap.PAGESIZE)
        whole = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        at = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        for page in (0, pages + 1):
            assert protect(at + page * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
        start = (pages + 1) * mmap.PAGESIZE - n if self.at_end else mmap.PAGESIZE + skew
        return np.frombuffer(whole, np.uint8, n - skew, start).view(dtype).reshape(shape)

    def put(self, x, skew=0):
        fenced = self.empty(x.shape, x.dtype, skew)
        fenced[...] = x
        return fenced

    def scratch(self, name, n):
        return self.put(np.full(n, np.nan, np.float32))

    def run(self, kernel, *arrays, skew=0, **kwargs):
        """The kernel's result, with its inputs, outputs and scratch all fenced. The last array starts skew bytes off."""
        arrays = [self.put(x, skew if x is arrays[-1] else 0) for x in arrays]
        kwargs = {name: self.put(x) if isinstance(x, np.ndarray) else x for name, x in kwargs.items()}
        for module in (kernels_linear, kernels_attend, kernels_tiles, selection):
            module.scratch = self.scratch
        np.empty, np.empty_like = self.empty, lambda x: self.empty(x.shape, x.dtype)
        try:
            return kernel(*arrays, **kwargs)
        finally:
            np.empty, np.empty_like = EMPTY, EMPTY_LIKE


def bf16(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def cases(rng, T):
    """(kernel, its twin, arrays, keywords) for T tokens, other sizes at random."""

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    E, N, S, D, D_v = (int(n) for n in rng.choice(SIZES, 5))
    N, S = N + int(rng.integers(0, 2)) * 300, S + int(rng.integers(0, 2)) * 700
    K, G = (int(n) for n in rng.integers(1, 5, 2))
    w = normal(N, E)
    E_32 = -(-E // 32) * 32
    yield kernels.linear, layers.linear, (normal(T, E_32), bf16(normal(N + 16, E_32))), {}  # fits matrix tiles
    for stored in (bf16(w), w.astype(np.float16), w):
        yield kernels.linear, layers.linear, (normal(T, E), stored), {}
    lo = rng.integers(0, S + 1, T)
    spans = (
        {},
        {"log_weight_KS": normal(K, S)},
        {"span_T2": np.stack([lo, np.minimum(S, lo + rng.integers(0, 70, T))], 1)},
        {"span_T2": np.stack([np.zeros(T, int), np.clip(np.arange(S - T, S) + 1, 0, S)], 1)},
    )
    for span in spans:
        arrays = normal(K, G, T, D), normal(K, S, D), normal(K, S, D_v)
        yield kernels.attend, attention.attend, arrays, {"scale": D**-0.5, **span}
    yield kernels.swiglu, layers.swiglu, (normal(T, E), normal(T, E)), {}
    yield kernels.rms_norm, layers.rms_norm, (normal(T, E), normal(E)), {"eps": 1e-6}
    yield kernels.rope, layers.rope, (normal(K, T, 2 * D), normal(T, D), normal(T, D)), {}


def selections(rng, T):
    """The same for the three steps of selection; what `best` chose is compared by its scores, since equal ones may tie."""
    M, D = int(rng.choice(SIZES)) + int(rng.integers(0, 2)) * 3000, int(rng.choice(SIZES))
    K, r = int(rng.integers(1, 4)), int(rng.integers(1, D + 1))
    k, v, basis = (rng.standard_normal(shape, dtype=np.float32) for shape in ((K, M, D), (K, M, D), (K, D, r)))
    q = rng.standard_normal((K, T, D), dtype=np.float32)
    n = int(rng.integers(1, min(M, 70) + 1))
    signs, short, pages = SignBits.of(k), ShortKeys.of(k, basis), PageBounds.of(k, 8)

    def best(ops, make, n):
        def run(q, *arrays):
            index = make(*arrays)
            return np.sort(np.take_along_axis(index.scores(q), ops.best(index, q, n), -1), axis=-1)

        return run

    for make, most, arrays in (
        (Keys, n, (k,)),
        (lambda bits: SignBits(bits, M), n, (signs.bits_KbD,)),
        (lambda basis, short: ShortKeys(basis, short, M), n, (short.basis_KDr, short.short_KbrI)),
        (lambda bounds: PageBounds(bounds, pages.n_units), min(n, pages.n_units), (pages.bounds_KbxI,)),
    ):
        yield best(selection, make, most), best(select, make, most), (q, *arrays), {}
    chosen = np.sort(rng.permuted(np.tile(np.arange(M), (K, T, 1)), axis=-1)[..., :n], axis=-1)
    fewer = {"k": int(rng.integers(1, n + 1))}
    yield selection.recheck, select.recheck, (q, k, chosen), fewer
    chosen[..., 1:][rng.random((K, T, n - 1)) < 0.1] = -1
    yield selection.attend_chosen, select.attend_chosen, (q, k, v, chosen), {"scale": D**-0.5}


def every_case(rng, T):
    yield from cases(rng, T)
    yield from selections(rng, T)


def main(rounds):
    rng = np.random.default_rng(0)
    kernels_linear.ALONE = kernels_pointwise.ALONE = kernels_attend.ALONE = selection.ALONE = (
        0  # threads start for the smallest job
    )
    numbers = range(1, min(2, threads.most()) + 1)
    for T in (1, 20):  # everything is compiled before np.empty is another function
        for kernel, _, arrays, kwargs in every_case(rng, T):
            for n in numbers:
                threads.set_threads(n)
                kernel(*arrays, **kwargs)
    for round in range(rounds):
        T = int(rng.integers(1, 9) if round % 2 else rng.integers(1, 131))
        for kernel, twin, arrays, kwargs in every_case(rng, T):
            want = twin(*arrays, **kwargs)
            for n in numbers:
                threads.set_threads(n)
                for fence in (Fence(at_end=True), Fence(at_end=False)):
                    skew = round % 4 if kernel is kernels.linear else 0
                    got = fence.run(kernel, *arrays, skew=skew, **kwargs)
                    for one, other in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
                        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main(int(sys.argv[1]))
