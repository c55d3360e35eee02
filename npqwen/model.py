"""One token's journey through Qwen3, top to bottom.

    id -> embed -> [ norm -> q, k, v -> q/k norm -> rotate -> attend -> o  (+)  norm -> gate, up -> silu * -> down (+) ]
       x n_layers -> norm -> logits

Letters in names are axes: T new tokens, E hidden, H query heads, K kv heads, D head_dim, F mlp width, V vocabulary.
The tokens of all rows of a batch lie one after another on the axis T; only attention knows which belong together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from npqwen import attention, layers
from npqwen.attention import KVCache, State
from npqwen.checkpoint import find
from npqwen.config import Config, parse_eos, read_config, read_json
from npqwen.errors import UserError
from npqwen.weights import Weights, load_weights

if TYPE_CHECKING:
    from npqwen.tokenizer import Tokenizer

# Tokens of a prompt that go through the layers at a time: bounds the activations, which then need no new pages.
CHUNK = 512

# attend(layer, q_HTD, k_KTD, v_KTD) -> out_HTD: q and k rotated, of the new tokens alone.
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Ops:
    """The array functions a forward pass is made of. Plain NumPy, or Numba twins of the same signatures."""

    name: str
    embed: Callable[[np.ndarray, np.ndarray], np.ndarray]
    linear: Callable[[np.ndarray, np.ndarray], np.ndarray]
    linears: Callable[..., list[np.ndarray]]
    rms_norm: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    rope: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    swiglu: Callable[[np.ndarray, np.ndarray], np.ndarray]
    attend: Callable[..., State]


NUMPY = Ops(
    "numpy",
    layers.embed,
    layers.linear,
    layers.linears,
    layers.rms_norm,
    layers.rope,
    layers.swiglu,
    attention.attend,
)


@dataclass(frozen=True)
class Model:
    """A checkpoint opened for reading. `revision` is the commit of a hub snapshot, else None."""

    source: str
    revision: str | None
    config: Config
    weights: Weights
    ops: Ops
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    sampling: dict[str, float]
    folder: Path

    def new_cache(self, capacity_B: Sequence[int], first_position: int = 0) -> KVCache:
        """An empty cache for len(capacity_B) rows."""
        return KVCache(self.config, capacity_B, self.ops.attend, first_position)


def load(source: str | Path, *, revision: str | None = None, kernels: str = "auto") -> Model:
    """Opens "tiny", a folder or a hub id "owner/name". Weights stay on disk until they are used.

    kernels: "numpy" is the plain reference, "numba" its compiled twins, "auto" numba.
    Raises UserError, in one line, for anything missing, malformed or not implemented.
    """
    from npqwen.tokenizer import load_tokenizer

    ops = choose_ops(kernels)
    checkpoint = find(str(source), revision)
    folder = checkpoint.folder
    config = read_config(folder)
    if config.rope.rope_type == "yarn":
        warnings.warn(f"{folder}: YaRN scaling is on for all lengths and changes short texts too", stacklevel=2)
    weights = load_weights(folder, config)
    tokenizer = load_tokenizer(folder)
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    eos_ids = parse_eos(generation.get("eos_token_id"), "generation_config.json") or config.eos_ids
    if not eos_ids and tokenizer is not None:
        eos_ids = tuple(tokenizer.eos_ids)
    sampling = {key: generation[key] for key in ("temperature", "top_k", "top_p") if generation.get(key) is not None}
    return Model(checkpoint.source, checkpoint.revision, config, weights, ops, tokenizer, eos_ids, sampling, folder)


def choose_ops(kernels: str) -> Ops:
    if kernels == "numpy":
        return NUMPY
    if kernels not in ("numba", "auto"):
        raise UserError(f"kernels {kernels!r} is unknown (numpy, numba, auto)")
    from npqwen import kernels as fast  # Numba takes most of a second to import: only who computes with it waits

    return Ops("numba", layers.embed, fast.linear, fast.linears, fast.rms_norm, fast.rope, fast.swiglu, fast.attend)


def forward(model: Model, ids_T: np.ndarray, positions_T: np.ndarray, attend: Attend) -> np.ndarray:
    """Hidden states after the final norm, float32 (T, E). What a token sees is attend's business alone."""
    x_TE = model.ops.embed(model.weights.embed, ids_T)
    rotation = layers.rotation(model.config, positions_T)
    for layer in range(model.config.n_layers):
        x_TE = block(model, layer, x_TE, rotation, attend)
    return model.ops.rms_norm(x_TE, model.weights.norm, model.config.eps)


def block(
    model: Model, layer: int, x_TE: np.ndarray, rotation: tuple[np.ndarray, np.ndarray], attend: Attend
) -> np.ndarray:
    """One decoder layer: attention, then the gated MLP, each added to the stream x_TE."""
    config, w, ops = model.config, model.weights.layers[layer], model.ops
    T = len(x_TE)

    h_TE = ops.rms_norm(x_TE, w.input_norm, config.eps)
    q_TN, k_TN, v_TN = ops.linears(h_TE, w.q, w.k, w.v)
    q_HTD = heads(_plus(q_TN, w.q_bias), config.n_heads)
    k_KTD = heads(_plus(k_TN, w.k_bias), config.n_kv_heads)
    v_KTD = heads(_plus(v_TN, w.v_bias), config.n_kv_heads)
    # Qwen3 normalises every head before it rotates it. The order matters: the norm's gain differs per channel, and
    # rotation mixes channels i and i + D/2.
    if w.q_norm is not None and w.k_norm is not None:
        q_HTD = ops.rms_norm(q_HTD, w.q_norm, config.eps)
        k_KTD = ops.rms_norm(k_KTD, w.k_norm, config.eps)
    q_HTD, k_KTD = ops.rope(q_HTD, *rotation), ops.rope(k_KTD, *rotation)
    out_HTD = attend(layer, q_HTD, k_KTD, v_KTD)
    out_TE = out_HTD.transpose(1, 0, 2).reshape(T, config.n_heads * config.head_dim)
    x_TE = x_TE + _plus(ops.linear(out_TE, w.o), w.o_bias)

    h_TE = ops.rms_norm(x_TE, w.mlp_norm, config.eps)
    gate_TF, up_TF = ops.linears(h_TE, w.gate, w.up)
    return x_TE + ops.linear(ops.swiglu(gate_TF, up_TF), w.down)


def heads(x_TN: np.ndarray, n: int) -> np.ndarray:
    """(T, n D) -> (n, T, D), contiguous: each head's tokens lie together."""
    T = len(x_TN)
    return np.ascontiguousarray(x_TN.reshape(T, n, -1).transpose(1, 0, 2))


def _plus(x_TN: np.ndarray, bias_N: np.ndarray | None) -> np.ndarray:
    return x_TN if bias_N is None else x_TN + bias_N


def unembed(model: Model, hidden_TE: np.ndarray) -> np.ndarray:
    """Logits (T, V) of the given hidden states. Pass the rows you need: one row of a 152k vocabulary is 0.6 MB."""
    return model.ops.linear(np.ascontiguousarray(hidden_TE), model.weights.unembed)


def logits(model: Model, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Logits after every position, float32 (T, V), plain causal attention."""
    ids_T = check_ids(model, ids)
    out_TV = np.empty((len(ids_T), model.config.vocab_size), np.float32)
    t = 0
    for hidden_TE in prefill(model, model.new_cache([len(ids_T)]), [ids_T]):
        out_TV[t : t + len(hidden_TE)] = unembed(model, hidden_TE)
        t += len(hidden_TE)
    return out_TV


def prefill(model: Model, cache: KVCache, rows: Sequence[np.ndarray], attend: Attend | None = None):
    """Runs the rows' tokens through the layers, CHUNK at a time, into the cache. Yields hidden_TE chunk by chunk.

    A chunk may end inside one row and begin inside another: the cache keeps the books.
    """
    row_T = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    ids_T = np.concatenate(rows)
    for t in range(0, len(ids_T), CHUNK):
        counts_B = np.bincount(row_T[t : t + CHUNK], minlength=len(rows))
        yield forward(model, ids_T[t : t + CHUNK], cache.append(counts_B), attend or cache.attend)


def check_ids(model: Model, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int64 (T,). UserError for an empty sequence or an id outside the model's vocabulary."""
    try:
        ids_T = np.asarray(ids)
    except ValueError:
        raise UserError("token ids must be one list of whole numbers, not lists of different lengths") from None
    if ids_T.size == 0:
        raise UserError("no token ids: the prompt is empty and there is nothing to start from")
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
        raise UserError(f"token ids must be one list of whole numbers, not {ids_T.dtype} of shape {ids_T.shape}")
    bad = ids_T[(ids_T < 0) | (ids_T >= model.config.vocab_size)]
    if bad.size:
        raise UserError(f"token id {bad[0]} is outside the model's vocabulary of {model.config.vocab_size}")
    return ids_T.astype(np.int64)
