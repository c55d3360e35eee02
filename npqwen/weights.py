"""Checkpoint tensors as arrays: memory-mapped safetensors, bf16 kept as its 16 bits, every tensor accounted for."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from npqwen.config import Config, read_json
from npqwen.errors import UserError

# NumPy has no bf16 type. A bf16 number is the upper half of a float32, so its bits are kept as uint16 and widened
# (exactly) where they are used: layers.widen for arrays, the kernels for one number at a time.
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
LOADABLE = ("F32", "F16", "BF16")
MAX_HEADER = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices (N_out, K_in) as stored; vectors float32; None where the architecture has none."""

    input_norm: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    mlp_norm: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    q_bias: np.ndarray | None = None
    k_bias: np.ndarray | None = None
    v_bias: np.ndarray | None = None
    o_bias: np.ndarray | None = None


@dataclass(frozen=True)
class Weights:
    """The whole model. `unembed` is `embed` itself in a tied checkpoint. `files` are the safetensors read, in order."""

    embed: np.ndarray
    layers: tuple[LayerWeights, ...]
    norm: np.ndarray
    unembed: np.ndarray
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors, a tied matrix counted once."""
        arrays = [self.embed, self.norm] + ([] if self.unembed is self.embed else [self.unembed])
        for layer in self.layers:
            arrays += [value for f in fields(layer) if (value := getattr(layer, f.name)) is not None]
        return sum(array.nbytes for array in arrays)

    def sha256(self) -> str:
        """Hash of the weight files' bytes, in order of their names: what a result was computed with."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


# Our field -> the checkpoint's name inside a layer.
LAYER_TENSORS = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
}


def layer_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Our field -> shape, for exactly the tensors that a layer of this architecture has."""
    E, F, D = config.hidden, config.mlp_width, config.head_dim
    HD, KD = config.n_heads * D, config.n_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (E,),
        "q": (HD, E),
        "k": (KD, E),
        "v": (KD, E),
        "o": (E, HD),
        "mlp_norm": (E,),
        "gate": (F, E),
        "up": (F, E),
        "down": (E, F),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (D,), "k_norm": (D,)}
    if config.qkv_bias:
        shapes |= {"q_bias": (HD,), "k_bias": (KD,), "v_bias": (KD,)}
    if config.o_bias:
        shapes |= {"o_bias": (E,)}
    return shapes


def load_weights(folder: Path, config: Config) -> Weights:
    """All tensors of the architecture, each present with its shape. Tensors nobody uses are warned about by name."""
    tensors, files = _read_folder(folder)
    prefix = _prefix(tensors)
    used: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        full_name = name if name.startswith("lm_head") else prefix + name
        if full_name not in tensors:
            raise UserError(f"{folder}: tensor {full_name} is missing{_hint(full_name, config)}")
        dtype, array = tensors[full_name]
        if array.shape != shape:
            raise UserError(
                f"{folder}: tensor {full_name} has shape {array.shape}, config.json implies {shape}"
                + (f" (head_dim {config.head_dim})" if "self_attn" in name else "")
            )
        if dtype not in LOADABLE:
            raise UserError(f"{folder}: tensor {full_name} is {dtype}; {', '.join(LOADABLE)} can be loaded")
        used.add(full_name)
        return array if array.ndim > 1 else widen(array)

    E, V = config.hidden, config.vocab_size
    embed = take("embed_tokens.weight", (V, E))
    shapes = layer_shapes(config)
    layers = tuple(
        LayerWeights(**{field: take(f"layers.{i}.{LAYER_TENSORS[field]}", shape) for field, shape in shapes.items()})
        for i in range(config.n_layers)
    )
    norm = take("norm.weight", (E,))
    unembed = embed if config.tied else take("lm_head.weight", (V, E))
    if unused := sorted(tensors.keys() - used):
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        warnings.warn(f"{folder}: tensors not used: {', '.join(unused[:5])}{more}", stacklevel=2)
    return Weights(embed, layers, norm, unembed, files)


def widen(array: np.ndarray) -> np.ndarray:
    """float32 of a stored array: bf16 bits (uint16) move to the upper half of a float32; f16 and f32 are cast. Exact."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32, copy=False)


def narrow(array: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of a float32 array, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded.astype(np.uint16))


def read_safetensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (dtype as the file spells it, read-only array over the mapped file), in the header's order.

    The format promises no alignment: a tensor that starts at an odd address is copied, so that every array is aligned.
    Raises UserError before any large allocation if the file is not whole safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
    length = int.from_bytes(head[:8], "little")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path}: a git-lfs pointer of {size} bytes, not the weights; fetch the file itself (git lfs pull)"
        )
    if size < 8 or length > size - 8:
        found = "an HTML page" if head.lstrip()[:1] == b"<" else "a partial download or not safetensors"
        raise UserError(f"{path}: {size} bytes, but its header asks for {8 + length}: looks like {found}")
    if length > MAX_HEADER:
        raise UserError(f"{path}: its header has {length:,} bytes; the safetensors library reads up to {MAX_HEADER:,}")
    try:
        with safe_open(path, "np") as checked:  # the library validates names, offsets and the file's length
            names = list(checked.keys())
    except SafetensorError as error:
        raise UserError(f"{path}: {size} bytes, not whole safetensors ({error}): a partial download?") from None
    if not names:
        return {}

    data = np.memmap(path, np.uint8, "r")
    header = json.loads(data[8 : 8 + length].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{path}: tensor {name} is {entry['dtype']}; {', '.join(LOADABLE)} can be loaded")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        raw, dtype = data[start:stop], np.dtype(DTYPES[entry["dtype"]])
        if start % dtype.itemsize:
            raw = raw.copy()
        array = np.asarray(raw).view(dtype).reshape(entry["shape"])
        array.flags.writeable = False
        tensors[name] = (entry["dtype"], array)
    return tensors


def _read_folder(folder: Path) -> tuple[dict[str, tuple[str, np.ndarray]], tuple[Path, ...]]:
    """Tensors of model.safetensors.index.json's shards, else of the one safetensors file. A stray file is not merged."""
    index = folder / "model.safetensors.index.json"
    found = sorted(folder.glob("*.safetensors"))
    if not index.exists():
        single = folder / "model.safetensors"
        paths = [single] if single.exists() else found
        if len(paths) != 1:
            what = f"several ({', '.join(p.name for p in found)}) and no {index.name}" if found else "no *.safetensors"
            raise UserError(f"{folder}: {what}; one model.safetensors, or shards with their index, can be loaded")
        _warn_strays(folder, set(found) - set(paths))
        return read_safetensors(paths[0]), (paths[0],)

    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(f, str) and f == Path(f).name for f in mapping.values()):
        raise UserError(f"{index}: no weight_map from tensor names to files of this folder")
    paths = [folder / name for name in sorted(set(mapping.values()))]
    if absent := [path.name for path in paths if not path.exists()]:
        lost = sorted(name for name, shard in mapping.items() if shard in absent)
        raise UserError(f"{folder}: shards missing: {', '.join(absent)} ({len(lost)} tensors, first {lost[0]})")
    _warn_strays(folder, set(found) - set(paths))
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for path in paths:
        shard = read_safetensors(path)
        if lost := [name for name, home in mapping.items() if home == path.name and name not in shard]:
            raise UserError(f"{path}: tensors that the index places here are missing: {', '.join(sorted(lost))}")
        if twice := sorted(shard.keys() & tensors.keys()):
            raise UserError(f"{path}: tensor {twice[0]} is in another shard too")
        tensors |= shard
    return tensors, tuple(paths)


def _warn_strays(folder: Path, strays: set[Path]) -> None:
    if strays:
        warnings.warn(f"{folder}: not read: {', '.join(sorted(p.name for p in strays))}", stacklevel=2)


def _prefix(tensors: dict[str, tuple[str, np.ndarray]]) -> str:
    """Some published files leave out "model."; a file with both spellings of one tensor is ambiguous."""
    with_prefix = {name.removeprefix("model.") for name in tensors if name.startswith("model.")}
    if both := sorted(with_prefix & tensors.keys()):
        raise UserError(f"tensor {both[0]} is present twice, with and without the prefix 'model.'")
    return "model." if with_prefix else ""


def _hint(name: str, config: Config) -> str:
    if name == "lm_head.weight":
        return " and config.json does not set tie_word_embeddings"
    return f" (model_type {config.model_type} needs it)" if "self_attn" in name else ""
