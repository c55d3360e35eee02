"""config.json read whole: every number the forward pass needs, and a refusal by name of what is not implemented."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npqwen.errors import UserError

SUPPORTED_TYPES = ("qwen3", "qwen2")


@dataclass(frozen=True)
class Rope:
    """Rotary position settings. `rope_type` is "default" or "yarn"; the fields after it belong to YaRN alone."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Angle per position of each channel pair, float64 (D/2,).

        YaRN divides slow pairs by `factor`, leaves fast pairs alone and ramps linearly between them.
        Source: YaRN, arXiv 2309.00071, section 3.2; the ramp's ends equal transformers' modeling_rope_utils.
        """
        half = head_dim // 2
        plain = self.theta ** (-np.arange(half, dtype=np.float64) / half)
        if self.rope_type == "default":
            return plain

        def pair_that_turns(rotations: float) -> float:
            """The (fractional) pair that makes this many full turns over the original context."""
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        slow = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
        return plain * (1.0 - slow) + plain / self.factor * slow


@dataclass(frozen=True)
class Config:
    """One architecture for Qwen3 and dense Qwen2/2.5: they differ in `qk_norm`, `qkv_bias` and `o_bias` alone.

    `windows[i]` is the number of latest tokens that layer i sees (the current one included), None for all.
    """

    model_type: str
    vocab_size: int
    hidden: int
    mlp_width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    max_position: int
    rope: Rope
    windows: tuple[int | None, ...]
    eos_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share one kv head: query head h reads kv head h // group."""
        return self.n_heads // self.n_kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def read_config(folder: Path) -> Config:
    """The Config of a checkpoint folder. UserError if config.json is missing, malformed or asks for something else."""
    return parse_config(read_json(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, read as UTF-8 whatever the locale."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no {path.name} here") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a JSON {type(data).__name__}, not an object")
    return data


def parse_config(raw: dict[str, Any]) -> Config:
    """The Config of a parsed config.json. Every refusal names the key, what it holds and what would work."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_TYPES:
        raise UserError(f"config.json: model_type {model_type!r} is not implemented ({', '.join(SUPPORTED_TYPES)})")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise UserError(f"config.json: a quantised checkpoint ({method}) is not implemented; bf16, f16 or f32 works")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act {raw['hidden_act']!r} is not implemented (silu)")

    hidden, n_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    n_kv_heads = n_heads if raw.get("num_key_value_heads") is None else _count(raw, "num_key_value_heads")
    if n_heads % n_kv_heads:
        raise UserError(f"config.json: {n_heads} query heads cannot share {n_kv_heads} key/value heads evenly")
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim")
    else:  # what transformers assumes; the loader compares it with the rows of q_proj and refuses a conflict
        head_dim = 128 if model_type == "qwen3" else hidden // n_heads
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd; rotation needs pairs of channels")

    max_position = _count(raw, "max_position_embeddings")
    n_layers = _count(raw, "num_hidden_layers")
    bias = bool(raw.get("attention_bias", False))
    return Config(
        model_type=model_type,
        vocab_size=_count(raw, "vocab_size"),
        hidden=hidden,
        mlp_width=_count(raw, "intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        eps=_number(raw, "rms_norm_eps"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        qkv_bias=bias or model_type == "qwen2",
        o_bias=bias and model_type == "qwen3",
        max_position=max_position,
        rope=_parse_rope(raw),
        windows=_parse_windows(raw, n_layers),
        eos_ids=parse_eos(raw.get("eos_token_id"), "config.json"),
    )


def parse_eos(value: Any, where: str) -> tuple[int, ...]:
    """End-of-text ids as a tuple, from an int, a list of ints, or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"{where}: eos_token_id {value!r} is not an id or a list of ids")
    return tuple(ids)


def _parse_rope(raw: dict[str, Any]) -> Rope:
    """Both spellings: rope_parameters (newer) and top-level rope_theta with rope_scaling (older).

    A reader of the old spelling that falls back to a default theta gives fluent nonsense, so there is no default here.
    """
    old = dict(raw.get("rope_scaling") or {})
    if "rope_theta" in raw:
        old["rope_theta"] = raw["rope_theta"]
    new = dict(raw.get("rope_parameters") or {})
    for spelling in (old, new):
        if "type" in spelling:
            spelling.setdefault("rope_type", spelling.pop("type"))
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise UserError(f"config.json: {key} is {old[key]!r} in one place and {new[key]!r} in rope_parameters")
    rope = old | new

    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError("config.json: rope_parameters per layer type are not implemented; one set for all layers works")
    rope_type = rope.get("rope_type") or "default"
    if rope_type not in ("default", "yarn"):
        raise UserError(f"config.json: rope_type {rope_type!r} is not implemented (default, yarn)")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not implemented (1.0)")
    theta = _number(rope, "rope_theta")
    if rope_type == "default":
        return Rope(theta)

    factor = _number(rope, "factor")
    if rope.get("attention_factor") is not None:
        attention_factor = float(rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
    else:
        attention_factor = _mscale(factor)
    return Rope(
        theta,
        "yarn",
        factor=factor,
        original_max_position=_count(rope, "original_max_position_embeddings"),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=attention_factor,
        truncate=bool(rope.get("truncate", True)),
    )


def _mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature as a factor on cos and sin (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _parse_windows(raw: dict[str, Any], n_layers: int) -> tuple[int | None, ...]:
    """A layer slides only if layer_types says so or, without that list, use_sliding_window and max_window_layers do."""
    full, sliding = "full_attention", "sliding_attention"
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") else n_layers
        types = [sliding if layer >= first else full for layer in range(n_layers)]
    if len(types) != n_layers:
        raise UserError(f"config.json: layer_types lists {len(types)} layers, num_hidden_layers is {n_layers}")
    unknown = sorted({str(kind) for kind in types} - {full, sliding})
    if unknown:
        raise UserError(f"config.json: layer_types {unknown[0]!r} is not implemented ({full}, {sliding})")
    window = _count(raw, "sliding_window") if sliding in types else None
    return tuple(window if kind == sliding else None for kind in types)


def _count(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"config.json: {key} is {value!r}; a whole number of 1 or more is needed")
    return value


def _number(raw: dict[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"config.json: {key} is {value!r}; a number above 0 is needed (there is no default)")
    return float(value)
