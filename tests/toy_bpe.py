"""A byte-level tokenizer small enough to know by heart: one id a byte, a few merges, Qwen's kinds of added tokens."""

import json
from pathlib import Path
from typing import Any

from npqwen.tokenizer import BYTE_OF, byte_level_bpe

# Several of these would join what Qwen's splitting keeps apart: digits, a letter and an apostrophe.
MERGES = [
    *("h e", "l l", "he ll", "hell o", "Ġ w", "- >", ") :", "): Ċ", "1 2", "Ġ 1", "' L", "'L L", "I '", "' T", "n '"),
    *("; Ċ", "Ċ Ċ", ";Ċ ĊĊ", "Ġ Ċ", "Ġ x", "Ċ x", "â Ħ", "âĦ «", "Ã ħ", "Ã ©", "Ġ ,", "H i"),
]
ADDED = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<think>": False,
    "</think>": False,
    "<think>!": False,
}
# The behaviour of Qwen3's template: turns between control tokens, thinking switched off by an empty block.
TEMPLATE = """{% for message in messages %}
{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
    {%- endfor %}
{% if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{% endif %}
"""


def vocab() -> dict[str, int]:
    entries = [*BYTE_OF, *(merge.replace(" ", "") for merge in MERGES)]
    return {token: i for i, token in enumerate(entries)}


def added() -> list[dict[str, Any]]:
    n = len(vocab())
    return [{"id": n + i, "content": token, "special": special} for i, (token, special) in enumerate(ADDED.items())]


def definition(**changes: Any) -> dict[str, Any]:
    """tokenizer.json's content. Changes to the model are given as model={...}."""
    whole = byte_level_bpe(vocab(), MERGES, added())
    whole["model"] |= changes.pop("model", {})
    return whole | changes


def settings(**changes: Any) -> dict[str, Any]:
    described = {str(a["id"]): {"content": a["content"], "special": a["special"]} for a in added()}
    return {"eos_token": "<|im_end|>", "added_tokens_decoder": described} | changes


def write(folder: Path, whole: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole or definition(), ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(**changes)), encoding="utf-8")
    return folder
