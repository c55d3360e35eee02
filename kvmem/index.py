"""Indexes: what a selector keeps beside the cache, built once from the text, and the scores of records with it.

`scores` is the method, in NumPy. The compiled twin (kernels.best) computes the same numbers block by block and keeps only
the best of them, so indexes lie in memory as it reads them: BLOCK units (records, or pages) together, and of each block
first the first number of all its units, then the second of all. So 64 scores grow side by side and none is added up
across lanes. The last block is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 64


class Index(Protocol):
    """Scores of `n_units` records or pages for the queries of each kv head. `nbytes`: what it holds beside the cache."""

    @property
    def nbytes(self) -> int: ...

    @property
    def n_units(self) -> int: ...

    def scores(self, q_KRD: np.ndarray) -> np.ndarray:
        """float32 (K, R, n_units) for R queries of each kv head; higher is better."""


@dataclass(frozen=True)
class Keys:
    """No index: the true scores q . k, without the scale, from the cache itself."""

    k_KMD: np.ndarray
    nbytes: int = 0

    @property
    def n_units(self) -> int:
        return self.k_KMD.shape[1]

    def scores(self, q_KRD: np.ndarray) -> np.ndarray:
        return q_KRD @ self.k_KMD.swapaxes(1, 2)


@dataclass(frozen=True)
class SignBits:
    """q . sign(k), the keys' index 1 bit a dimension, the query in full precision.

    bits_KbD are uint64: bit i of [head, b, d] says that dimension d of record 64 b + i is not negative.
    """

    bits_KbD: np.ndarray
    n_units: int

    @classmethod
    def of(cls, k_KMD: np.ndarray) -> SignBits:
        blocks_KbDi = in_blocks(k_KMD >= 0)
        bytes_KbDi = np.packbits(blocks_KbDi, axis=3, bitorder="little")
        return cls(np.ascontiguousarray(bytes_KbDi).view("<u8")[..., 0], k_KMD.shape[1])

    @property
    def nbytes(self) -> int:
        return self.bits_KbD.nbytes

    def signs(self) -> np.ndarray:
        """The unpacked signs, float32 (K, M, D): 1 or -1."""
        bytes_KbDi = self.bits_KbD[..., None].view(np.uint8)
        bits_KbDi = np.unpackbits(bytes_KbDi, axis=3, bitorder="little")
        return out_of_blocks(bits_KbDi, self.n_units) * np.float32(2) - np.float32(1)

    def scores(self, q_KRD: np.ndarray) -> np.ndarray:
        return q_KRD @ self.signs().swapaxes(1, 2)


@dataclass(frozen=True)
class ShortKeys:
    """(q P) . (k P): keys and queries in the r columns of a basis P, basis_KDr. short_KbrI holds the keys k P."""

    basis_KDr: np.ndarray
    short_KbrI: np.ndarray
    n_units: int

    @classmethod
    def of(cls, k_KMD: np.ndarray, basis_KDr: np.ndarray) -> ShortKeys:
        return cls(np.ascontiguousarray(basis_KDr), in_blocks(k_KMD @ basis_KDr), k_KMD.shape[1])

    @property
    def nbytes(self) -> int:
        return self.basis_KDr.nbytes + self.short_KbrI.nbytes

    def scores(self, q_KRD: np.ndarray) -> np.ndarray:
        short_KMr = out_of_blocks(self.short_KbrI, self.n_units)
        return q_KRD @ self.basis_KDr @ short_KMr.swapaxes(1, 2)


@dataclass(frozen=True)
class PageBounds:
    """The largest score that a record within a page's bounds can have: sum_d max(q_d min_d, q_d max_d).

    Where q_d is positive the maximum counts, where it is negative the minimum. bounds_KbxI holds per page D maxima and D
    minima, x = 2 D in all.
    """

    bounds_KbxI: np.ndarray
    n_units: int

    @classmethod
    def of(cls, k_KMD: np.ndarray, page: int) -> PageBounds:
        """A last page may be short."""
        starts = np.arange(0, k_KMD.shape[1], page)
        high_KPD, low_KPD = (bound.reduceat(k_KMD, starts, axis=1) for bound in (np.maximum, np.minimum))
        return cls(in_blocks(np.concatenate([high_KPD, low_KPD], axis=2)), len(starts))

    @property
    def nbytes(self) -> int:
        return self.bounds_KbxI.nbytes

    def parts(self, q_KRD: np.ndarray) -> np.ndarray:
        """The query's positive numbers, which meet the maxima, and its negative ones, which meet the minima: (K, R, 2 D)."""
        return np.concatenate([np.maximum(q_KRD, np.float32(0)), np.minimum(q_KRD, np.float32(0))], axis=2)

    def scores(self, q_KRD: np.ndarray) -> np.ndarray:
        return self.parts(q_KRD) @ out_of_blocks(self.bounds_KbxI, self.n_units).swapaxes(1, 2)


def in_blocks(x_KUx: np.ndarray) -> np.ndarray:
    """Numbers x of every unit in the order of the kernels: (K, blocks, x, BLOCK), zeros after the last unit."""
    K, U, X = x_KUx.shape
    blocks = -(-U // BLOCK)
    padded_KUx = np.zeros((K, blocks * BLOCK, X), x_KUx.dtype)
    padded_KUx[:, :U] = x_KUx
    return np.ascontiguousarray(padded_KUx.reshape(K, blocks, BLOCK, X).swapaxes(2, 3))


def out_of_blocks(x_KbxI: np.ndarray, n_units: int) -> np.ndarray:
    """in_blocks undone: (K, n_units, x)."""
    K, blocks, X, _ = x_KbxI.shape
    return x_KbxI.swapaxes(2, 3).reshape(K, blocks * BLOCK, X)[:, :n_units]
