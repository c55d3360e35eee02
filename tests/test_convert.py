"""A GGUF file written by the gguf package becomes a folder that transformers and npqwen open, with the same ids."""

import builtins
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import toy
import toy_bpe

import npqwen
from npqwen import convert as converter
from npqwen.convert import convert
from npqwen.errors import UserError
from npqwen.tokenizer import load_tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
V = len(toy_bpe.vocab()) + len(toy_bpe.ADDED) + 3  # three embedding rows beyond the tokenizer


def tokens() -> tuple[list[str], list[int]]:
    """The toy tokenizer's tokens and types, padded as llama.cpp's converter pads to the embedding's rows."""
    texts, types = list(toy_bpe.vocab()), [NORMAL] * len(toy_bpe.vocab())
    texts += toy_bpe.ADDED
    types += [CONTROL if special else USER_DEFINED for special in toy_bpe.ADDED.values()]
    pad = range(len(texts), V)
    return texts + [f"[PAD{i}]" for i in pad], types + [UNUSED] * len(pad)


def write_gguf(
    path: Path,
    family: str = "qwen3",
    *,
    arch: str | None = None,
    quantise: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    texts: tuple[list[str], list[int]] | None = None,
    metadata: dict[str, Any] | None = None,
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> torch.nn.Module:
    """Write a random toy model as GGUF, tensors named by the gguf package's own map; return the model."""
    model = toy.build(family, vocab_size=V, **changes)
    c = model.config
    writer = gguf.GGUFWriter(path, arch or family)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    entries, types = texts or tokens()
    writer.add_token_list(entries)
    writer.add_token_types(types)
    writer.add_token_merges(toy_bpe.MERGES)
    writer.add_eos_token_id(entries.index("<|im_end|>"))
    writer.add_bos_token_id(entries.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(toy_bpe.TEMPLATE)
    for key, value in (metadata or {}).items():
        key = key.format(arch=arch or family)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), c.num_hidden_layers)
    arrays = {n: p.detach().numpy() for n, p in model.named_parameters() if n != drop}
    if c.tie_word_embeddings:
        arrays.pop("lm_head.weight", None)
    for name, array in arrays.items():
        as_type = quantise if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = array if as_type == gguf.GGMLQuantizationType.F32 else gguf.quantize(array, as_type)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=as_type)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def reload(folder: Path) -> torch.nn.Module:
    """The folder opened by transformers, which must find every tensor and want no other."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_sources_rounded_to_bf16(tmp_path, family, tied):
    source = write_gguf(tmp_path / "m.gguf", family, tie_word_embeddings=tied, num_attention_heads=6)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    loaded = reload(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    expected = {name: p.to(torch.bfloat16) for name, p in source.named_parameters()}
    for name, p in loaded.named_parameters():
        assert torch.equal(p, expected.pop(name)), name
    assert not expected
    config = loaded.config
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, key) == getattr(source.config, key)
    assert config.tie_word_embeddings == tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_npqwen_opens_the_folder_and_agrees_with_transformers(tmp_path, family):
    write_gguf(tmp_path / "m.gguf", family)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    model = npqwen.load(tmp_path / "out", kernels="numpy")
    ids = model.tokenizer.encode("hello world")
    expected, _ = toy.logits_and_hidden(reload(tmp_path / "out").float(), ids)
    assert np.abs(npqwen.logits(model, ids) - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_stored_types_are_widened_by_gguf_itself_however_it_is_sliced(tmp_path, monkeypatch, kind):
    kind = gguf.GGMLQuantizationType[kind]
    source = write_gguf(
        tmp_path / "m.gguf", quantise=kind, hidden_size=32, intermediate_size=64, num_attention_heads=4, head_dim=16
    )
    convert(tmp_path / "m.gguf", tmp_path / "whole")
    monkeypatch.setattr(converter, "CHUNK_BYTES", 3 * 4 * 32)  # three rows, which divide nothing
    convert(tmp_path / "m.gguf", tmp_path / "sliced")
    stored = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert stored == (tmp_path / "sliced" / "model.safetensors").read_bytes()
    name = "model.layers.0.mlp.down_proj.weight"
    original = dict(source.named_parameters())[name].detach().numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(original, kind), kind)).to(torch.bfloat16)
    assert torch.equal(dict(reload(tmp_path / "whole").named_parameters())[name], expected)


# Tokenizer


def test_ids_special_flags_and_template_are_the_sources(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    for i, (text, kind) in enumerate(zip(*tokens(), strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            assert tokenizer.encode(text) == [i]
            assert (i in tokenizer.special_ids) == (kind == CONTROL)
        elif kind == UNUSED:
            assert tokenizer.decode([i], skip_special=False) == ""
    toy_ids = [toy_bpe.vocab()[t] for t in ("hello", "Ġw", "o", "r", "l", "d", "Ã©")]
    assert tokenizer.encode("hello worlde\u0301") == toy_ids
    assert tokenizer.chat_template == toy_bpe.TEMPLATE
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokens()[0].index("<|im_end|>"), tokens()[0].index("<|endoftext|>")]


def test_transformers_reads_the_same_ids(tmp_path):
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    ours, theirs = load_tokenizer(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("hello world", "x<think>y<|im_end|>", "e\u0301 中", "don'T 12;\n\n"):
        assert ours.encode(text) == theirs(text).input_ids


def test_unused_ids_between_added_tokens_keep_the_others_in_place(tmp_path):
    texts, types = tokens()
    n = len(toy_bpe.vocab())
    texts[n + 2], texts[V - 1] = texts[V - 1], texts[n + 2]  # <|im_end|> goes behind a gap
    types[n + 2], types[V - 1] = types[V - 1], types[n + 2]
    write_gguf(tmp_path / "m.gguf", texts=(texts, types))
    convert(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.encode("<|im_end|>") == [V - 1] == list(tokenizer.eos_ids)
    assert tokenizer.encode("<think>") == [texts.index("<think>")]


def test_written_text_is_utf8_with_plain_line_ends(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    for path in (tmp_path / "out").glob("*.json"):
        assert b"\r" not in path.read_bytes()
    assert "Ġ" in (tmp_path / "out" / "tokenizer.json").read_bytes().decode("utf-8")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama'"),
        ({"{arch}.rope.dimension_count": 4}, "rope.dimension_count is 4 but heads have 8"),
        ({"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0}, "rope scaling 'linear'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(tmp_path, monkeypatch, metadata, message):
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", _unless("tokenizer.ggml.model", metadata))
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", _unless("tokenizer.ggml.pre", metadata))
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def _unless(key: str, metadata: dict[str, Any]):
    """A writer method that leaves `key` to the metadata given, which may hold it."""

    def add(self, value):
        if key not in metadata:
            self.add_string(key, value)

    return add


def test_yarn_comes_over(tmp_path):
    settings = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    write_gguf(tmp_path / "m.gguf", metadata={f"{{arch}}.rope.scaling.{k}": v for k, v in settings.items()})
    convert(tmp_path / "m.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


# Wrong input


def test_another_architecture_is_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", arch="llama")
    with pytest.raises(UserError, match=r"architecture 'llama' is not supported \(qwen2, qwen3\)"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04" + b"x" * 99, b"<html>" + b"x" * 99])
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"^.*m\.gguf: not a GGUF file \(it starts with .*$"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_pointer_and_an_absent_file_are_told_apart(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="git-lfs pointer"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="no such file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")


@pytest.mark.parametrize("kept", [4, 20, 24, 100, 2000, 0.5, 0.9, -1])
def test_a_cut_file_is_refused_in_one_line(tmp_path, kept):
    write_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: int(len(whole) * kept) if 0 < kept < 1 else kept])
    with pytest.raises(UserError, match=r"m\.gguf: .*download complete\?$"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path):
    write_gguf(tmp_path / "m.gguf", drop="model.layers.1.self_attn.k_norm.weight")
    with pytest.raises(UserError, match=r"tensor blk\.1\.attn_k_norm\.weight is missing"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(UserError, match=r"tensor rope_freqs\.weight is unknown for qwen3"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_a_nan_weight_is_refused_and_nothing_stays_behind(tmp_path, monkeypatch):
    build = toy.build

    def poisoned(*args, **kwargs):
        model = build(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight[3, 4] = float("nan")
        return model

    monkeypatch.setattr(toy, "build", poisoned)
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"blk\.2\.ffn_up\.weight holds NaN or infinity"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_the_package_is_named_when_it_is_not_installed(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_gguf(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(UserError, match=r"pip install 'npqwen\[gguf\]'"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


# The target folder


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    for target in ("out", "out/mine"):
        with pytest.raises(UserError, match="already there and not empty"):
            convert(tmp_path / "m.gguf", tmp_path / target)
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_an_empty_folder_is_filled_and_parents_are_made(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    for target in (tmp_path / "out", tmp_path / "a" / "b"):
        (tmp_path / "out").mkdir(exist_ok=True)
        convert(tmp_path / "m.gguf", target)
        assert (target / "model.safetensors").exists()


def test_an_interrupted_conversion_leaves_nothing_and_a_killed_ones_rest_is_cleared(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf")

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converter, "narrow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]

    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / "stray").write_text("of a killed run")
    convert(tmp_path / "m.gguf", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "out"]
    assert sorted(os.listdir(tmp_path / "out")) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
