"""A GGUF file becomes a folder that `npqwen.load` opens: config.json, bf16 model.safetensors, tokenizer files.

Only what llama.cpp's converter does to Qwen2 and Qwen3 is undone: tensor names. It permutes no rows of q and k for
these families (unlike Llama's), so none are permuted back. Quantised blocks are widened by the `gguf` package itself.
"""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from npqwen.errors import UserError
from npqwen.gguf_tokenizer import tokenizer_files
from npqwen.weights import narrow

CHUNK_BYTES = 32 << 20  # of float32 in one dequantised slice; bounds memory whatever the matrix

LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
FAMILY_TENSORS = {
    "qwen2": {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"},
    "qwen3": {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(gguf_path: str | Path, folder: str | Path) -> None:
    """Write `folder` from a Qwen2 or Qwen3 GGUF file.

    It appears whole or not at all: the files are written beside it and renamed.
    Raises UserError for anything that is not such a file, and for a folder that already holds something.
    """
    gguf_path, folder = Path(gguf_path), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already there and not empty; name a new folder")
    fields, tensors = _read(gguf_path)
    config, names = _config(gguf_path, fields, tensors)
    files = {"config.json": config} | tokenizer_files(gguf_path, fields, config)

    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(
        f".{folder.name}.unfinished"
    )  # always the same name: the next try clears a killed one
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
            (unfinished / name).write_text(text, encoding="utf-8", newline="\n")
        with open(unfinished / "model.safetensors", "wb") as file:
            write_bf16(file, [(names[t.name], t.shape[::-1].tolist(), _slices(gguf_path, t)) for t in tensors])
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_bf16(file: BinaryIO, tensors: list[tuple[str, list[int], Iterator[np.ndarray]]]) -> None:
    """Write a safetensors file of (name, shape, float32 slices of its rows), one slice in memory at a time."""
    from tqdm import tqdm

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _ in tensors:
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    with tqdm(total=end, unit="B", unit_scale=True, desc="bf16 weights", disable=None) as bar:
        for _, _, slices in tensors:
            for x in slices:
                bar.update(file.write(narrow(x).astype("<u2", copy=False).tobytes()))


def _read(path: Path) -> tuple[dict[str, Any], list]:
    """The metadata and the tensors (gguf's ReaderTensor, data memory-mapped) of a GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError("reading GGUF files needs the gguf package: pip install 'npqwen[gguf]'") from None
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with open(path, "rb") as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        hint = (
            "; it is a git-lfs pointer, fetch the file itself" if start.startswith(b"version https://git-lfs") else ""
        )
        raise UserError(f"{path}: not a GGUF file (it starts with {start[:4]!r}){hint}")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(f"{path}: cannot be read as GGUF ({error}); is the download complete?") from None
    if fields.get("split.count", 1) > 1:
        raise UserError(f"{path}: one of {fields['split.count']} parts; join them first (llama-gguf-split --merge)")
    return fields, reader.tensors


def _config(path: Path, fields: dict[str, Any], tensors: list) -> tuple[dict[str, Any], dict[str, str]]:
    """config.json's content by Hugging Face names, and GGUF tensor name -> Hugging Face tensor name."""
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UserError(f"{path}: architecture {family!r} is not supported (qwen2, qwen3)")

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(f"{family}.{key}", default)
        if value is None:
            raise UserError(f"{path}: the metadata lacks {family}.{key}")
        return float(str(np.float32(value))) if isinstance(value, float) else value  # 1e-06, not 9.999999974752427e-07

    shapes = {t.name: t.shape[::-1].tolist() for t in tensors}
    n_layers, n_heads, hidden = get("block_count"), get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise UserError(f"{path}: {family}.{key} is {get(key)} but heads have {head_dim} dimensions; not supported")

    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for i in range(n_layers):
        for gguf_name, name in (LAYER_TENSORS | FAMILY_TENSORS[family]).items():
            names[f"blk.{i}.{gguf_name}"] = f"model.layers.{i}.{name}"
    if missing := names.keys() - shapes.keys():
        raise UserError(f"{path}: the tensor {min(missing)} is missing (and {len(missing) - 1} more)")
    tied = "output.weight" not in shapes  # some files quantise the tied matrix twice, differently: then both are kept
    if not tied:
        names["output.weight"] = "lm_head.weight"
    if unknown := shapes.keys() - names.keys():
        raise UserError(f"{path}: the tensor {min(unknown)} is unknown for {family} (and {len(unknown) - 1} more)")

    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": get("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(path, fields, family),
        "max_position_embeddings": get("context_length"),
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    if family == "qwen3":
        config["attention_bias"] = False
    return config, names


def _rope_scaling(path: Path, fields: dict[str, Any], family: str) -> dict[str, Any] | None:
    """YaRN's settings if the file has them; other scaling, and YaRN's rarer knobs, are refused by name."""
    scaling = {k.split(".")[-1]: v for k, v in fields.items() if k.startswith(f"{family}.rope.scaling.")}
    kind = scaling.pop("type", "none")
    scaling.pop("finetuned", None)
    if kind == "none":
        return None
    if kind != "yarn" or scaling.keys() != {"factor", "original_context_length"}:
        raise UserError(
            f"{path}: rope scaling {kind!r} with {', '.join(sorted(scaling))} is not supported (none, yarn)"
        )
    return {
        "rope_type": "yarn",
        "factor": float(scaling["factor"]),
        "original_max_position_embeddings": scaling["original_context_length"],
    }


def _slices(path: Path, tensor: Any) -> Iterator[np.ndarray]:
    """The tensor's values as float32, a few rows at a time."""
    from gguf import dequantize

    rows, columns = tensor.data.shape[0], int(tensor.shape[0]) if tensor.data.ndim > 1 else 1
    step = max(1, CHUNK_BYTES // (4 * columns))
    for i in range(0, rows, step):
        try:
            x = dequantize(tensor.data[i : i + step], tensor.tensor_type)
        except NotImplementedError:
            raise UserError(f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}, not supported") from None
        if not np.isfinite(x).all():
            raise UserError(f"{path}: {tensor.name} holds NaN or infinity")
        yield x
