"""A text, read once: what every arm starts from, and all that it may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npqwen import layers
from npqwen.attention import State, grouped
from npqwen.errors import UserError
from npqwen.model import CHUNK, Model, check_ids, forward


@dataclass(frozen=True)
class Settings:
    """The numbers that all arms share. METHODS: `n_sinks` first tokens stay exact in every arm; fitted arms see at most
    `n_fit` simulated queries per kv head, at positions up to `horizon` after the text, with ridge `ridge`."""

    n_sinks: int = 4
    horizon: int = 256
    n_fit: int = 4096
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in (("n_sinks", 0), ("horizon", 1), ("n_fit", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{name} {value!r}: a whole number of {least} or more is needed")
        if not 0 < self.ridge < float("inf"):
            raise UserError(f"ridge {self.ridge!r}: a number above 0 is needed")


@dataclass(frozen=True)
class Reading:
    """Per layer k (K, n, D) rotated, v (K, n, D) and q (H, n, D) after q_norm and *before* RoPE; float32, read-only."""

    model: Model
    ids: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    q: tuple[np.ndarray, ...]
    # What several arms would compute alike (simulated queries and their exact answers) is computed once and kept here.
    _derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


def read(model: Model, ids: Sequence[int] | np.ndarray) -> Reading:
    """Runs the text through the model once, causally, and keeps what each layer saw.

    Raises UserError for ids outside the vocabulary, a text longer than the model's context, or sliding layers (there a
    query after the text does not see all of it, and an arm that stands in for all of it would be something else).
    """
    config, ids_T = model.config, check_ids(model, ids)
    n = len(ids_T)
    if n > config.max_position:
        raise UserError(f"the text has {n} tokens; the model has {config.max_position} positions")
    if any(window is not None for window in config.windows):
        sliding = next(i for i, window in enumerate(config.windows) if window is not None)
        raise UserError(f"layer {sliding} has a sliding window; memories need full attention in every layer")
    cache = model.new_cache([n])
    q_LHTD = np.empty((config.n_layers, config.n_heads, n, config.head_dim), np.float32)
    for t in range(0, n, CHUNK):
        positions_T = cache.append([min(CHUNK, n - t)])
        cos_T2, sin_T2 = layers.rotation(config, positions_T)
        shrink = np.float32(config.rope.attention_factor**-2)  # YaRN's rotation also stretches; 1 otherwise

        def record(layer: int, q_HTD: np.ndarray, k_KTD: np.ndarray, v_KTD: np.ndarray) -> np.ndarray:
            unrotated_HTD = layers.rope(q_HTD, cos_T2 * shrink, -sin_T2 * shrink)  # noqa: B023  a rotation's inverse
            q_LHTD[layer][:, positions_T] = unrotated_HTD  # noqa: B023  called within this turn of the loop
            return cache.attend(layer, q_HTD, k_KTD, v_KTD)

        forward(model, ids_T[t : t + CHUNK], positions_T, record)
    for array in (ids_T, cache.k_LKSD, cache.v_LKSD, q_LHTD):
        array.flags.writeable = False
    return Reading(model, ids_T, tuple(cache.k_LKSD), tuple(cache.v_LKSD), tuple(q_LHTD))


@dataclass(frozen=True)
class Region:
    """One layer of a reading as an arm sees it: the m = n - n_sinks records after the sinks, and nothing later."""

    reading: Reading
    layer: int
    seed: int
    settings: Settings

    @property
    def k_KMD(self) -> np.ndarray:
        return self.reading.k[self.layer][:, self.settings.n_sinks :]

    @property
    def v_KMD(self) -> np.ndarray:
        return self.reading.v[self.layer][:, self.settings.n_sinks :]

    @property
    def n_records(self) -> int:
        return len(self.reading) - self.settings.n_sinks

    @property
    def scale(self) -> float:
        return self.reading.model.config.scale

    @property
    def attend(self) -> Callable[..., State]:
        """attend(q_KGTD, k_KSD, v_KSD, scale=..., log_weight_KS=...) of the model's own kernels."""
        return self.reading.model.ops.attend

    @property
    def fast(self) -> bool:
        """Whether selection runs in Numba kernels or in their NumPy twins."""
        return self.reading.model.ops.name == "numba"

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator of its own for each use, layer and seed: no arm's draws depend on another's."""
        return np.random.default_rng([self.seed, self.layer, *purpose.encode()])

    def future(self) -> tuple[np.ndarray, State]:
        """Simulated future queries q_KND and their exact attention over the region, as a state (K, N, D), (K, N).

        The text's own queries, all G heads of a group, turned to positions n + u, u uniform in [0, horizon). No question
        and no later text is ever seen. Computed once per reading, layer and seed.
        """
        key = ("future", self.layer, self.seed, self.settings)
        return self.reading.derived(key, self._simulate)

    def _simulate(self) -> tuple[np.ndarray, State]:
        config, n = self.reading.model.config, len(self.reading)
        q_KGTD = grouped(self.reading.q[self.layer], config.n_kv_heads)
        rng = self.rng("future")
        pool = q_KGTD.shape[1] * n
        N = min(self.settings.n_fit, pool)
        q_KND = np.empty((config.n_kv_heads, N, config.head_dim), np.float32)
        for head in range(config.n_kv_heads):
            chosen = rng.choice(pool, N, replace=False)
            positions = n + rng.integers(0, self.settings.horizon, N)
            plain_1ND = q_KGTD[head].reshape(1, pool, config.head_dim)[:, chosen]
            q_KND[head] = layers.rope(plain_1ND, *layers.rotation(config, positions))[0]
        exact = self.attend(q_KND[:, None], self.k_KMD, self.v_KMD, scale=self.scale)
        return q_KND, State(exact.out[:, 0], exact.lse[:, 0])
