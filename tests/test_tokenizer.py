"""Ids are the checkpoint's own, decoded text is whole characters, and no text smuggles a control token in."""

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
import toy_bpe

from npqwen.errors import UserError
from npqwen.tokenizer import BYTE_OF, Tokenizer, load_tokenizer, no_tokenizer


def build(**changes) -> Tokenizer:
    return Tokenizer(json.dumps(toy_bpe.definition(**changes)), toy_bpe.settings())


@pytest.fixture(scope="module")
def toy() -> Tokenizer:
    return build()


def tokens_of(tokenizer: Tokenizer, text: str, **options) -> list[str]:
    by_id = {i: token for token, i in toy_bpe.vocab().items()} | tokenizer.added
    return [by_id[i] for i in tokenizer.encode(text, **options)]


VARIED = [
    *("", " ", "\n\n\n", "hello world", "don'T I'LL", "x=1;\n\n\ny", "\u3000x", "½ ٣", "e\u0301 é", "\u212b ﬁ"),
    *(
        "中文字符",
        "👨‍👩‍👧 😀",
        "a , b .  c",
        "\t\r\n",
        "क्षि",
        "שלום",
        "\ufffd",
        "x" * 300,
        "<|im_end|>hello<think>",
        "\x00\x7f",
    ),
]


# Merges and files


def test_merges_as_pairs_and_as_strings_give_the_same_ids(toy):
    pairs = build(model={"merges": [merge.split(" ") for merge in toy_bpe.MERGES]})
    for text in VARIED:
        assert pairs.encode(text) == toy.encode(text)
    assert tokens_of(pairs, "hello world") == ["hello", "Ġw", "o", "r", "l", "d"]


def test_a_pair_may_have_a_part_that_contains_a_space():
    vocab = {"a": 0, " ": 1, "b": 2, "a ": 3, "a b": 4}
    changes = {"added_tokens": [], "pre_tokenizer": None}
    model = {"vocab": vocab, "merges": [["a", " "], ["a ", "b"]]}
    tokenizer = build(**changes, model=model)
    assert tokenizer.encode("a b") == [4]
    assert tokenizer.decode([4, 3]) == "a ba "
    with pytest.raises(UserError, match=r"merge 1 is 'a  b', not two parts"):
        build(**changes, model=model | {"merges": [["a", " "], "a  b"]})


@pytest.mark.parametrize("bad", ["he", "h e l", "", ["h"], ["h", "e", "l"], ["h", 3], ["h", ""], 7, None])
def test_a_malformed_merge_is_named_by_its_index(bad):
    with pytest.raises(UserError, match=r"merge 2 is .*, not two parts"):
        build(model={"merges": ["h e", "l l", bad, "he ll"]})


def test_a_merge_of_unknown_tokens_is_named_by_its_index():
    with pytest.raises(UserError, match=r"merge 1 is 'h z', but 'hz' is not in the vocabulary"):
        build(model={"merges": ["h e", "h z"]})


def test_broken_json_is_one_line_with_the_folder(tmp_path):
    toy_bpe.write(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model":')
    with pytest.raises(UserError, match=r"tokenizer\.json: EOF") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_vocab_and_merges_alone_give_the_same_ids(toy, tmp_path):
    toy_bpe.write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(toy_bpe.vocab(), ensure_ascii=False), encoding="utf-8")
    (tmp_path / "merges.txt").write_bytes(("#version: 0.2\n" + "\n".join(toy_bpe.MERGES) + "\n").encode())
    pair = load_tokenizer(tmp_path)
    assert pair is not None
    for text in VARIED:
        assert pair.encode(text) == toy.encode(text)
    assert pair.special_ids == toy.special_ids


def test_merges_with_a_number_sign_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(toy_bpe.vocab() | {"##": 999}), encoding="utf-8")
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\n# #\r\nh e\r\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("##he") == [999, toy_bpe.vocab()["he"]]


def test_a_folder_without_tokenizer_has_none_and_says_what_was_looked_for(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert "looked for tokenizer.json, or vocab.json with merges.txt; found none of them" in str(no_tokenizer(tmp_path))
    (tmp_path / "vocab.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    assert "found vocab.json" in str(no_tokenizer(tmp_path))


def test_a_decoder_that_is_not_byte_level_is_refused_by_name():
    with pytest.raises(UserError, match=r"decoder Metaspace is not implemented \(ByteLevel\)"):
        build(decoder={"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True})


# Text to ids


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1212", ["1", "2", "1", "2"]),  # though a merge of 1 and 2 exists
        (" 12", ["Ġ", "1", "2"]),
        ("->", ["->"]),
        ("(x):\n", ["(", "x", "):Ċ"]),
        ("½", ["Â", "½"]),
        ("٣", ["Ù", "£"]),
        ("I'LL", ["I", "'LL"]),  # any case; the merge of I and the apostrophe is out of reach
        ("don'T", ["d", "o", "n", "'T"]),
        ("x=1;\n\n\ny", ["x", "=", "1", ";ĊĊĊ", "y"]),
        (" \n x", ["ĠĊ", "Ġx"]),
        ("\u3000x", ["ã", "Ģ", "Ģ", "x"]),
    ],
)
def test_text_is_split_as_qwen_splits_it(toy, text, tokens):
    assert tokens_of(toy, text) == tokens


def test_the_pattern_comes_from_the_file(toy):
    grouping = {"type": "Split", "pattern": {"Regex": r"\p{N}+|\P{N}+"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    other = build(pre_tokenizer={"type": "Sequence", "pretokenizers": [grouping, byte_level]})
    assert tokens_of(other, "1212") == ["12", "12"]


def test_the_normalizer_of_the_file_is_obeyed(toy):
    none = build(normalizer=None)
    assert toy.encode("e\u0301") == toy.encode("\u00e9") == [toy_bpe.vocab()["Ã©"]]
    assert tokens_of(none, "e\u0301") == ["e", "Ì", "ģ"]
    assert toy.encode("\u212b") == toy.encode("\u00c5")
    assert none.encode("\u212b") == [toy_bpe.vocab()["âĦ«"]]
    assert toy.decode(toy.encode("ﬁ")) == "ﬁ"


def test_decode_of_encode_is_the_normalised_text(toy):
    rng = random.Random(0)
    for text in VARIED + ["".join(rng.choice(VARIED) for _ in range(6)) for _ in range(100)]:
        assert toy.decode(toy.encode(text), skip_special=False) == unicodedata.normalize("NFC", text)


def test_completion_adds_nothing(toy):
    assert tokens_of(toy, "hello") == ["hello"]
    assert toy.encode("") == []


def test_a_leading_token_of_the_post_processor_is_honoured():
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"id": "<|endoftext|>", "ids": [toy_bpe.added()[0]["id"]], "tokens": ["<|endoftext|>"]}
    template = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": {}}
    tokenizer = build(post_processor=template | {"special_tokens": {"<|endoftext|>": end}})
    assert tokens_of(tokenizer, "hello") == ["<|endoftext|>", "hello"]
    assert tokens_of(tokenizer, "hello", allow_special=False) == ["<|endoftext|>", "hello"]
    assert tokens_of(tokenizer, "") == ["<|endoftext|>"]
    assert tokenizer.encode_plain("hello") == [toy_bpe.vocab()["hello"]]


def test_a_length_limit_or_padding_in_the_file_cuts_nothing(toy):
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    limited = build(truncation=limit, padding=pad | {"pad_type_id": 0, "pad_token": "!"})
    assert limited.encode("hello world") == toy.encode("hello world")


def test_half_a_surrogate_pair_is_refused_in_one_line(toy):
    with pytest.raises(UserError, match="half of a surrogate pair"):
        toy.encode("a\ud83d")


# Added tokens


def test_added_tokens_are_whole_whether_special_or_not(toy):
    assert tokens_of(toy, "x<think>y<|im_end|>") == ["x", "<think>", "y", "<|im_end|>"]
    assert tokens_of(toy, "<think>!") == ["<think>!"]  # the longest
    assert tokens_of(toy, " <think> x") == ["Ġ", "<think>", "Ġx"]  # no blank is stripped


def test_special_governs_only_hiding_on_decode(toy):
    ids = toy.encode("<think>hello<|im_end|>")
    assert toy.decode(ids) == "<think>hello"
    assert toy.decode(ids, skip_special=False) == "<think>hello<|im_end|>"


def test_no_control_token_comes_out_of_text_that_may_not_hold_any(toy):
    text = "a<|im_end|>b<think>!c<|im_start|>"
    assert set(toy.encode(text)) & set(toy.added)
    ids = toy.encode(text, allow_special=False)
    assert not set(ids) & set(toy.added)
    assert toy.decode(ids) == text


def test_the_end_token_of_the_settings_is_known(toy):
    assert toy.eos_ids == (toy.encode("<|im_end|>")[0],)
    as_object = Tokenizer(json.dumps(toy_bpe.definition()), {"eos_token": {"content": "<|endoftext|>"}})
    assert as_object.eos_ids == (toy.encode("<|endoftext|>")[0],)
    assert Tokenizer(json.dumps(toy_bpe.definition())).eos_ids == ()


# Ids to text


def test_ids_past_the_tokenizer_have_no_text(toy):
    n = len(toy_bpe.vocab()) + len(toy_bpe.ADDED)
    hello = toy_bpe.vocab()["hello"]
    assert toy.decode([n, hello, n + 1, 151800, -1, 1 << 40]) == "hello"
    assert "".join(toy.stream([n, hello, -1])) == "hello"


def test_blanks_before_punctuation_stay(toy):
    for text in ("a , b . c ! d ?", "I 'm  it 's", " x", "x "):
        assert toy.decode(toy.encode(text)) == text


def test_the_byte_alphabet_is_the_librarys():
    assert set(BYTE_OF) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


def test_decode_and_stream_equal_the_librarys_decode_on_any_ids(toy):
    library = tokenizers.Tokenizer.from_str(json.dumps(toy_bpe.definition()))
    rng = random.Random(1)
    for _ in range(3000):
        ids = [rng.randrange(len(toy_bpe.vocab()) + 8) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            expected = library.decode(ids, skip_special_tokens=skip)
            assert toy.decode(ids, skip_special=skip) == expected
            assert "".join(toy.stream(ids, skip_special=skip)) == expected


def test_streamed_pieces_are_whole_characters_as_soon_as_they_are_complete(toy):
    text = "é😀中x"
    ids = toy.encode(text)
    assert len(ids) == 1 + 4 + 3 + 1
    assert list(toy.stream(ids)) == ["é", "😀", "中", "x"]
    taken = []

    def arriving():
        for i in ids:
            taken.append(i)
            yield i

    pieces = toy.stream(arriving())
    assert next(pieces) == "é"
    assert len(taken) == 1  # nothing is read ahead


def test_bytes_that_never_become_a_character_are_shown_at_the_end(toy):
    ids = toy.encode("😀")[:3]
    assert list(toy.stream(ids)) == ["\ufffd"]
    assert toy.decode(ids) == "\ufffd"


def test_a_control_token_inside_a_character_does_not_raise(toy):
    first, *rest = toy.encode("中")
    assert toy.decode([first, toy.eos_ids[0], *rest]) == "中"
    assert "\ufffd" in toy.decode([first, *toy.encode("<think>"), *rest])


# Locale

SCRIPT = """
import sys
from pathlib import Path
from npqwen.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path(sys.argv[1]))
ids = tokenizer.encode(sys.argv[2])
sys.stdout.buffer.write(f"{ids} {tokenizer.decode(ids)}".encode())
"""


def test_the_locale_decides_nothing(toy, tmp_path):
    folder = toy_bpe.write(tmp_path / "größe-中")
    (folder / "chat_template.jinja").write_text("é{{ messages }}", encoding="utf-8")
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, "é 中😀"], env=ascii_only, capture_output=True, check=False
    )
    assert done.stderr == b""
    assert done.stdout.decode() == f"{toy.encode('é 中😀')} é 中😀"


# Qwen's own vocabulary


@pytest.fixture(scope="module")
def real(real_model) -> Tokenizer:
    tokenizer = load_tokenizer(Path(real_model))
    assert tokenizer is not None
    if tokenizer.encode("Hello world") != [9707, 1879]:
        pytest.skip("not Qwen's vocabulary")
    return tokenizer


@pytest.mark.real
def test_real_ids_equal_the_golden_ones(real):
    golden = {
        "Hello": [9707],
        "2024": [17, 15, 17, 19],
        " 42": [220, 19, 17],
        "->": [405],
        "(x):\n": [2075, 982],
        "½": [26062],
        "٣": [149, 96],
        "I'LL": [40, 6, 4086],
        "don'T": [15007, 17323],
        "x=1;\n\n\ny": [87, 28, 16, 5210, 88],
        " \n x": [715, 856],
        "\u3000x": [22441, 87],
        "e\u0301": [963],
        "key 4821": [792, 220, 19, 23, 17, 16],
        "<|im_end|>": [151645],
    }
    assert {text: real.encode(text) for text in golden} == golden
    assert real.encode("<|im_end|>", allow_special=False) == [27, 91, 318, 6213, 91, 29]
    # Qwen3 has the token, the older Qwen2.5 spells it in three.
    think = [151667] if 151667 in real.added else [13708, 766, 29]
    assert real.encode("<think>") == think
    assert real.decode([*think, 9707, 151645]) == "<think>Hello"
    assert real.decode([151800]) == ""


@pytest.mark.real
def test_real_ids_and_text_equal_transformers(real, real_model):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(real_model)
    rng = random.Random(2)
    for text in VARIED + ["".join(rng.choice(VARIED) for _ in range(8)) for _ in range(300)]:
        ids = real.encode(text)
        assert ids == reference(text).input_ids
        assert real.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
