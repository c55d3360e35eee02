"""Text to ids and back, by the checkpoint's own tokenizer.json. Nothing about the splitting of text is decided here.

Byte-level BPE only (all Qwen models): an id stands for bytes, so a character may take several ids, and `stream` waits
for the last of them. Files are read as UTF-8 whatever the locale.
"""

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from npqwen.config import read_json
from npqwen.errors import UserError

# How Qwen2 and Qwen3 cut text before merging: contractions, letters with one mark before, single digits, punctuation,
# blanks. Used only where a checkpoint has no tokenizer.json, which holds its own.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies (GPT-2): printable Latin-1 stands for itself, the rest is 256 on."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_alphabet()


class Tokenizer:
    """A tokenizer.json at work. `settings` is tokenizer_config.json, `chat_template` the checkpoint's own or None."""

    def __init__(self, definition: str, settings: dict[str, Any] | None = None, chat_template: str | None = None):
        self.settings = settings or {}
        self.chat_template = chat_template
        self._tokenizer = _build(definition)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_ids = tuple(i for i in [self._tokenizer.token_to_id(self.token("eos_token"))] if i is not None)

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of the text, with what the file's own post-processor adds (for Qwen: nothing) and no chat template.

        Control tokens spelled out in the text are read as such, unless `allow_special` is False: then nothing in the
        text can become one, as for text from a stranger.
        """
        tokenizer = self._tokenizer if allow_special else self._plain
        return tokenizer.encode(_well_formed(text)).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of the text alone: no control tokens read, nothing added. What stands between two control tokens."""
        return self._plain.encode(_well_formed(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the ids, no blank touched. Ids beyond the tokenizer (models have spare rows) have no text."""
        return b"".join(self._bytes(int(i), skip_special) for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterable[int], *, skip_special: bool = True) -> Iterator[str]:
        """Pieces of text as ids arrive, which together are decode(ids). A character is never split; none is empty."""
        decoder = self.decoder(skip_special=skip_special)
        for i in ids:
            if piece := decoder.push(i):
                yield piece
        if rest := decoder.finish():
            yield rest

    def decoder(self, *, skip_special: bool = True) -> "Decoder":
        """One text in the making, for a caller that has the ids one at a time."""
        return Decoder(self, skip_special)

    def token(self, name: str) -> str:
        """The text of a named token of tokenizer_config.json, such as eos_token; "" where there is none."""
        value = self.settings.get(name) or ""
        return value.get("content", "") if isinstance(value, dict) else value

    def _bytes(self, i: int, skip_special: bool) -> bytes:
        if i in self.added:
            return b"" if skip_special and i in self.special_ids else self.added[i].encode()
        token = self._tokenizer.id_to_token(i) if 0 <= i < 1 << 32 else None
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[c] for c in token)
        except KeyError:
            return token.encode()

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A twin without added tokens. The library's switch leaves those that are not special, such as <tool_call>."""
        return _build(json.dumps(json.loads(self._tokenizer.to_str()) | {"added_tokens": []}))


class Decoder:
    """Ids in, text out, a whole character at a time: what stream() does, pushed instead of pulled."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, i: int) -> str:
        """The text that this id completes; "" while a character is still short of bytes."""
        return self._utf8.decode(self._tokenizer._bytes(int(i), self._skip_special))

    def finish(self) -> str:
        """What is left of a character that was never completed, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder: tokenizer.json, else vocab.json and merges.txt, else None."""
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = read_json(config_file) if config_file.exists() else {}
    if (folder / "tokenizer.json").exists():
        definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        definition = json.dumps(_from_vocab_files(folder, settings))
    else:
        return None
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else _template(settings)
    try:
        return Tokenizer(definition, settings, template)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def no_tokenizer(folder: Path) -> UserError:
    """What to raise where text is given for a checkpoint whose load_tokenizer was None."""
    found = [name for name in ("vocab.json", "merges.txt") if (folder / name).exists()]
    return UserError(
        f"{folder}: no tokenizer (looked for tokenizer.json, or vocab.json with merges.txt; "
        f"found {' and '.join(found) or 'none of them'}); token ids still work"
    )


def byte_level_bpe(vocab: dict[str, int], merges: list, added: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of a tokenizer.json in Qwen's form. `added`: id, content and special of the tokens beside merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [flags | token for token in added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _build(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises plain Exception, with a column number of a one-line file
        raise UserError(f"tokenizer.json: {_bad_merge(definition) or error}") from None
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    kinds = [d.get("type") for d in decoder.get("decoders", [decoder])]
    if kinds != ["ByteLevel"]:
        raise UserError(f"tokenizer.json: decoder {', '.join(map(str, kinds))} is not implemented (ByteLevel)")
    tokenizer.no_truncation()  # some published files cut at 512 ids without a word
    tokenizer.no_padding()
    return tokenizer


def _bad_merge(definition: str) -> str | None:
    """The first merge that is not two known parts with a known whole: "a b" in older files, ["a", "b"] in newer."""
    try:
        model = json.loads(definition)["model"]
    except (ValueError, TypeError, KeyError):
        return None
    vocab = model.get("vocab") or {}
    for i, merge in enumerate(model.get("merges") or []):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            return f"merge {i} is {merge!r}, not two parts"
        for token in (*parts, "".join(parts)):
            if token not in vocab:
                return f"merge {i} is {merge!r}, but {token!r} is not in the vocabulary"
    return None


def _from_vocab_files(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json's content from the older pair of files; the added tokens stand in tokenizer_config.json."""
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version")]
    added = [{"id": int(i), "special": False} | token for i, token in settings.get("added_tokens_decoder", {}).items()]
    return byte_level_bpe(read_json(folder / "vocab.json"), merges, sorted(added, key=lambda token: token["id"]))


def _template(settings: dict[str, Any]) -> str | None:
    """The chat template inside tokenizer_config.json: one text, or several by name of which "default" is meant."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        return {t["name"]: t["template"] for t in template}.get("default")
    return template


def _well_formed(text: str) -> str:
    """Arguments read under an ASCII locale carry raw bytes as lone surrogates; here they are UTF-8 again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", errors="surrogateescape").decode("utf-8")
        except UnicodeError:
            raise UserError("the text holds half of a surrogate pair, which no Unicode text can") from None
    return text
