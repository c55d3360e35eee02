"""Arms that keep records as they are: all of them, none, the latest, or a random subset. Ceiling, floor and baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvmem.reading import Region
from npqwen.attention import State
from npqwen.errors import UserError


@dataclass(frozen=True)
class Records:
    """Exact attention over kept records k_KCD, v_KCD."""

    k_KCD: np.ndarray
    v_KCD: np.ndarray
    scale: float
    attend: Callable[..., State]

    @property
    def stored_bytes(self) -> int:
        return self.k_KCD.nbytes + self.v_KCD.nbytes

    def state(self, q_KGTD: np.ndarray) -> State:
        return self.attend(q_KGTD, self.k_KCD, self.v_KCD, scale=self.scale)


def keep(region: Region, chosen_KC: np.ndarray) -> Records:
    """The records of these indices, a row of them per kv head, copied so that nothing else stays in memory."""
    index = chosen_KC[:, :, None]
    k, v = np.take_along_axis(region.k_KMD, index, 1), np.take_along_axis(region.v_KMD, index, 1)
    return Records(k, v, region.scale, region.attend)


@dataclass(frozen=True)
class Full:
    """All records: the ceiling, and the identity check through the same path as every other arm."""

    def __str__(self) -> str:
        return "full"

    def check(self, n_records: int, head_dim: int) -> None:
        pass

    def build(self, region: Region) -> Records:
        return Records(region.k_KMD, region.v_KMD, region.scale, region.attend)

    def reads(self, n_records: int, head_dim: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Nothing:
    """No record: the floor. The question sees the sinks and itself."""

    def __str__(self) -> str:
        return "none"

    def check(self, n_records: int, head_dim: int) -> None:
        pass

    def build(self, region: Region) -> Records:
        return Records(region.k_KMD[:, :0], region.v_KMD[:, :0], region.scale, region.attend)

    def reads(self, n_records: int, head_dim: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Recent:
    """The last floor(m / f) records."""

    f: int

    def __str__(self) -> str:
        return f"recent/{self.f}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_share(self, n_records // self.f, "records", n_records)

    def build(self, region: Region) -> Records:
        first = region.n_records - region.n_records // self.f
        every_head = np.arange(first, region.n_records)[None].repeat(region.k_KMD.shape[0], 0)
        return keep(region, every_head)

    def reads(self, n_records: int, head_dim: int) -> float:
        return (n_records // self.f) / n_records


@dataclass(frozen=True)
class Random:
    """A seeded random subset of floor(m / f) records, its own in every kv head: what chance alone keeps."""

    f: int

    def __str__(self) -> str:
        return f"random/{self.f}"

    def check(self, n_records: int, head_dim: int) -> None:
        check_share(self, n_records // self.f, "records", n_records)

    def build(self, region: Region) -> Records:
        rng, m = region.rng("random"), region.n_records
        rows = [np.sort(rng.choice(m, m // self.f, replace=False)) for _ in range(region.k_KMD.shape[0])]
        return keep(region, np.stack(rows))

    def reads(self, n_records: int, head_dim: int) -> float:
        return (n_records // self.f) / n_records


def check_share(arm: object, n_kept: int, what: str, n_records: int) -> None:
    if n_kept < 1:
        raise UserError(f"{arm}: its budget leaves 0 {what} of {n_records} records; a smaller divisor works")
