"""selector+function: k records exactly, and a function for the rest of the text's mass.

The records carry their own mass; the function speaks only for what remains, so no record is counted twice:

    Z_rest = max(Z_f - Z_R, 0),   o = (Z_R o_R + Z_rest o_f) / (Z_R + Z_rest)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmem.memory import Arm, Part
from kvmem.reading import Region
from npqwen.attention import State, merge


@dataclass(frozen=True)
class Mix:
    selector: Arm
    function: Arm

    def __str__(self) -> str:
        return f"{self.selector}+{self.function}"

    def check(self, n_records: int, head_dim: int) -> None:
        self.selector.check(n_records, head_dim)
        self.function.check(n_records, head_dim)

    def build(self, region: Region) -> Mixed:
        return Mixed(self.selector.build(region), self.function.build(region))

    def reads(self, n_records: int, head_dim: int) -> float:
        return self.selector.reads(n_records, head_dim) + self.function.reads(n_records, head_dim)


@dataclass(frozen=True)
class Mixed:
    selected: Part
    function: Part

    @property
    def stored_bytes(self) -> int:
        return self.selected.stored_bytes + self.function.stored_bytes

    def state(self, q_KGTD: np.ndarray) -> State:
        records, function = self.selected.state(q_KGTD), self.function.state(q_KGTD)
        return merge(records, State(function.out, remaining(function.lse, records.lse)))


def remaining(lse_function: np.ndarray, lse_records: np.ndarray) -> np.ndarray:
    """ln max(e^lse_function - e^lse_records, 0), without leaving log space; -inf where nothing remains."""
    rest = np.full(lse_function.shape, -np.inf, np.float32)
    some = lse_function > lse_records
    difference = lse_records[some] - lse_function[some]  # below 0; -inf where no record was selected
    rest[some] = lse_function[some] + np.log(-np.expm1(difference))
    return rest
