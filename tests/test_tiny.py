import json
import re
import sys
from pathlib import Path
from random import Random

import pytest
import tokenizers

from experiments import facts
from npqwen.checkpoint import TINY

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tools import tiny_data  # noqa: E402

SINK_ID = 0


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def prose() -> str:
    return "\n".join(" ".join(paragraph) for paragraph in tiny_data.prose())


def test_all_files_together_have_at_most_8_megabytes():
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 8_000_000


def test_the_config_leaves_nothing_to_a_default():
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    for key in ("head_dim", "rope_theta", "rms_norm_eps", "eos_token_id", "max_position_embeddings", "vocab_size"):
        assert config[key] is not None


def test_every_digit_is_one_token_and_the_space_before_it_another(tokenizer):
    ids = tokenizer.encode("key 4821", add_special_tokens=False).ids
    assert [tokenizer.decode([i]) for i in ids][-5:] == [" ", "4", "8", "2", "1"]


def test_the_sink_token_is_added_once_in_front_and_only_with_special_tokens(tokenizer):
    plain = tokenizer.encode("A text.", add_special_tokens=False).ids
    assert SINK_ID not in plain
    assert tokenizer.encode("A text.").ids == [SINK_ID, *plain]
    assert tokenizer.token_to_id(tiny_data.SINK) == SINK_ID


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x\n", "漢字 and é 🙂", "  two  blanks ", "\r\n\n", "1,234.5"])
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_fact_inside_a_text_keeps_its_tokens(tokenizer):
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    prose = "\n\n".join(
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "experiments/texts").glob("1_*.txt"))
    )
    made = facts.place(prose, 20, 2000, encode, Random(0))
    ids = encode(made.text)
    assert 1850 <= len(ids) <= 2000
    joined = "/" + "/".join(map(str, ids)) + "/"
    for fact in made.facts:
        assert joined.count("/" + "/".join(map(str, encode(" " + fact.sentence))) + "/") == 1


def test_training_and_experiment_names_have_the_same_number_of_tokens(tokenizer):
    n_tokens = {
        half: sum(len(tokenizer.encode(" " + word, add_special_tokens=False).ids) for word in facts.words(half))
        for half in ("training", "experiment")
    }
    assert abs(n_tokens["training"] / n_tokens["experiment"] - 1) < 0.01


def test_no_word_of_an_experiment_name_is_trained_on(prose):
    experiment = set(facts.words("experiment"))
    train, progress = tiny_data.split_words()
    assert not experiment & set(train)
    assert not experiment & set(progress)
    assert not set(train) & set(progress)
    assert not experiment & set(re.findall(r"[A-Za-z]+", prose))


def test_no_sentence_or_question_of_the_experiments_is_trained_on():
    def bare(template: str) -> str:
        return re.sub(r"\{\w+\}", "", template)

    trained = {bare(t) for group in (tiny_data.FACTS, tiny_data.QUESTIONS) for t in group}
    trained |= {bare(t) for group in (tiny_data.EASY_FACTS, tiny_data.EASY_QUESTIONS) for t in group}
    assert len(tiny_data.FACTS) * len(tiny_data.QUESTIONS) >= 25
    asked = {bare(t) for pair in facts.TEMPLATES for t in pair}
    held_out = {bare(t) for pair in tiny_data.HELD_OUT for t in pair}
    assert not asked & trained
    assert not held_out & (asked | trained)


def test_no_sentence_of_the_experiment_texts_is_in_the_training_prose(prose):
    for path in (ROOT / "experiments/texts").glob("*.txt"):
        for sentence in facts.sentences(path.read_text(encoding="utf-8")):
            assert sentence not in prose


def test_a_row_of_training_is_fixed_by_seed_step_and_row(tokenizer):
    source = tiny_data.Source(tokenizer, [[f"Sentence {c} about nothing." for c in "abcdefghij"]] * 8, seed=0)
    stage = tiny_data.Stage(end=1, n_rows=1, n=256, n_facts=5, n_text=140, easy=0.5, first_digit=8.0)
    row = source.text(1, 2, stage, 140)
    assert row == source.text(1, 2, stage, 140)
    assert row != source.text(1, 3, stage, 140)
    assert len(row.ids) == len(row.weights) == 256
    experiment = set(facts.words("experiment"))
    assert not experiment & set(re.findall(r"[A-Za-z]+", tokenizer.decode(row.ids)))


def test_transformers_opens_the_folder_and_it_recalls_a_fact():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    prose = (ROOT / "experiments/texts/2_river_deltas.txt").read_text(encoding="utf-8")

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    made = facts.place(prose, 5, 400, encode, Random(0))
    right = 0
    for fact in made.facts:
        ids = tokenizer.encode(made.text) + encode(fact.question)
        assert ids[0] == SINK_ID
        out = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        right += tokenizer.decode(out[0, len(ids) :]).split()[:1] == [fact.number]
    assert right >= 4
