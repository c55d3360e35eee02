"""The tokenizer inside a GGUF file, as the files Hugging Face's readers know."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from npqwen.errors import UserError
from npqwen.tokenizer import byte_level_bpe

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf's token types; the other two belong to other tokenizer kinds


def tokenizer_files(path: Path, fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json as JSON objects, by file name.

    Every id is checked against the source before anything is written.
    """
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, cut) != ("gpt2", "qwen2"):
        raise UserError(f"{path}: tokenizer {kind!r} with pre-tokenizer {cut!r} is not supported ('gpt2' with 'qwen2')")
    if fields.get("tokenizer.ggml.add_bos_token", False) or fields.get("tokenizer.ggml.add_eos_token", False):
        raise UserError(f"{path}: the tokenizer adds a start or end token by itself, which is not supported")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if len(tokens) != len(types) or len(tokens) > config["vocab_size"]:
        raise UserError(f"{path}: {len(tokens)} tokens, {len(types)} types, {config['vocab_size']} embedding rows")
    if other := set(types) - {NORMAL, CONTROL, USER_DEFINED, UNUSED}:
        raise UserError(f"{path}: token type {min(other)} does not belong into a byte-level tokenizer")

    added = [
        {"id": i, "content": token, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer = _tokenizer(tokens, types, fields["tokenizer.ggml.merges"], added)
    _check_ids(path, tokenizer, tokens, types)

    def named(key: str) -> str | None:
        i = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if i is None else tokens[i]

    described = {str(a["id"]): {k: v for k, v in a.items() if k != "id"} for a in tokenizer["added_tokens"]}
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "add_bos_token": False,
        "added_tokens_decoder": described,
        "bos_token": None,
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": config["max_position_embeddings"],
        "split_special_tokens": False,
    }
    if "tokenizer.chat_template" in fields:
        tokenizer_config["chat_template"] = fields["tokenizer.chat_template"]
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": _end_ids(fields, added),
            "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        },
    }


def _tokenizer(tokens: list[str], types: list[int], merges: list[str], added: list[dict]) -> dict[str, Any]:
    """tokenizer.json's content.

    Added tokens get their ids by following the last vocabulary entry, so an unused token before one becomes an entry.
    """
    n_entries = 1 + max(i for i, kind in enumerate(types) if kind == NORMAL)
    for a in added:
        if a["id"] > n_entries and UNUSED in types[n_entries : a["id"]]:
            n_entries = a["id"]
    return byte_level_bpe({token: i for i, token in enumerate(tokens[:n_entries])}, merges, added)


def _check_ids(path: Path, tokenizer: dict[str, Any], tokens: list[str], types: list[int]) -> None:
    try:
        built = Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"{path}: the tokenizer cannot be built: {error}") from None
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != UNUSED and built.token_to_id(token) != i:
            raise UserError(f"{path}: token {token!r} has id {i} there and would get {built.token_to_id(token)}")


def _end_ids(fields: dict[str, Any], added: list[dict]) -> list[int]:
    """The file's end tokens, and <|endoftext|>, at which Qwen's chat models stop as well as at their end of turn."""
    ids = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    ids += [a["id"] for a in added if a["content"] == "<|endoftext|>"]
    return list(dict.fromkeys(i for i in ids if i is not None))
