"""Random checkpoints of any geometry, written by transformers itself: every weight random, norms and biases included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}


def build(family: str = "qwen3", seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A float32 transformers model in eager attention. Weights are scaled so that logits are of order 1 to 10."""
    torch.manual_seed(seed)
    make_config, make_model = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    model = make_model(make_config(**(SMALL | changes), attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.5)
            elif "embed" in name and not model.config.tie_word_embeddings:
                p.normal_(0, 1)
            else:
                p.normal_(0, p.shape[-1] ** -0.5)
    return model


def save(model: torch.nn.Module, folder: Path) -> Path:
    """The model's folder as transformers writes it."""
    model.save_pretrained(folder)
    return folder


def logits_and_hidden(model: torch.nn.Module, ids: list[int]):
    """transformers' logits (T, V) and the hidden states before layer 0, after each layer, and after the final norm."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0].numpy(), [h[0].numpy() for h in out.hidden_states]


def open_toy(folder: Path, family: str = "qwen3", seed: int = 0, kernels: str = "numpy", **changes: Any):
    """A random checkpoint written into folder and opened by npqwen."""
    import npqwen

    return npqwen.load(save(build(family, seed, **changes), folder), kernels=kernels)


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes: id = byte for all 256, <|end|> = 256. No merges, so ids can be read by eye."""
    from npqwen.tokenizer import BYTE_OF, byte_level_bpe

    end = {"id": 256, "content": "<|end|>", "special": True}
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_bpe(BYTE_OF, [], [end])), encoding="utf-8")
