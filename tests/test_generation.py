"""Generation: what ends a row, what is shown of it, what it draws, and that batch mates do not matter."""

import json
from dataclasses import replace

import numpy as np
import pytest
import toy

import npqwen
from npqwen.errors import UserError
from npqwen.generation import Options, new_rows, penalise, sample, stream

VOCAB = 260  # 256 bytes, <|end|> = 256, and three ids that no tokenizer knows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy.save(toy.build(seed=4, vocab_size=VOCAB, max_position_embeddings=64), folder)
    toy.add_tokenizer(folder)
    return npqwen.load(folder, kernels="numpy")


PROMPT = [72, 105]


def greedy(model, **changes):
    return list(npqwen.generate(model, PROMPT, **({"max_new_tokens": 12} | changes)))


def test_greedy_equals_transformers(tmp_path):
    import torch

    reference = toy.build(seed=8)
    model = npqwen.load(toy.save(reference, tmp_path), kernels="numpy")
    for prompt in ([1, 2, 3], [50], list(range(30))):
        with torch.no_grad():
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)  # without it, transformers takes every 0 of the prompt for padding
            want = reference.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert list(npqwen.generate(model, prompt, 20)) == want[0, len(prompt) :].tolist()


def test_any_of_several_end_ids_ends_the_row_and_is_reported(model):
    free = greedy(model, eos=[])
    ends = [free[5], free[3], 1 if 1 not in free[:4] else 2]
    cut = min(free.index(e) for e in ends if e in free)
    [row] = npqwen.generate_batch(model, [PROMPT], 12, eos=ends)
    assert (row.ids, row.finish, row.ended_by) == (free[:cut], "eos", free[cut])
    [row] = npqwen.generate_batch(model, [PROMPT], 12, eos=free[0])
    assert (row.ids, row.text, row.finish, row.ended_by) == ([], "", "eos", free[0])


def folder_with(tmp_path, model, config_eos, generation_eos, tokenizer_eos):
    folder = tmp_path / "ends"
    toy.save(toy.build(vocab_size=VOCAB), folder)
    toy.add_tokenizer(folder)
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config_eos}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(
        json.dumps({} if generation_eos is ... else {"eos_token_id": generation_eos})
    )
    if tokenizer_eos:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer_eos}))
    return npqwen.load(folder, kernels="numpy")


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "want"),
    [
        (5, [7, 8], "<|end|>", (7, 8)),
        (5, 7, None, (7,)),
        (5, ..., "<|end|>", (5,)),
        ([5, 6], None, "<|end|>", (5, 6)),
        (None, ..., "<|end|>", (256,)),
        (None, ..., None, ()),
    ],
)
def test_end_ids_come_from_generation_config_then_config_then_tokenizer(
    tmp_path, model, config, generation, tokenizer, want
):
    assert folder_with(tmp_path, model, config, generation, tokenizer).eos_ids == want


def test_an_end_id_outside_the_vocabulary_is_an_error_and_not_a_stop_that_never_fires(model):
    with pytest.raises(UserError, match=f"end-of-text id {VOCAB} is outside"):
        greedy(model, eos=VOCAB)


def bytes_of(text):
    return list(text.encode())


def forced(model, script):
    """The model with its greedy answer fixed: one row answers with the bytes of the script, then with 'z's.

    The choice is forced where it is made, in the logits: everything behind them runs as always.
    """
    step = iter(range(1000))

    def linear(x_TE, w_NE):
        out = model.ops.linear(x_TE, w_NE)
        if w_NE is model.weights.unembed:
            out[0, (script + b"z" * 64)[next(step)]] = 1e4
        return out

    return replace(model, ops=replace(model.ops, linear=linear))


@pytest.mark.parametrize(
    ("answer", "stop", "text", "finish"),
    [
        ("one<END>two", "<END>", "one", "stop"),
        ("one<EN", "<END>", "one<EN", "length"),
        ("a\n\nb", "\n\n", "a", "stop"),
        ("<END>", "<END>", "", "stop"),
        ("caf\u00e9<END>", ["x", "<END>"], "caf\u00e9", "stop"),
        ("ababac", "abac", "ab", "stop"),
        ("xyz", ["yz", "z"], "x", "stop"),
    ],
)
def test_a_stop_text_spread_over_tokens_is_cut_and_never_shown(model, answer, stop, text, finish):
    script = answer.encode()
    fake = forced(model, script)
    options = Options(max_new_tokens=len(script), stop=(stop,) if isinstance(stop, str) else tuple(stop))
    rows = new_rows(fake, [PROMPT], options, 0)
    shown = ""
    for _, _, piece in stream(fake, rows, options):
        shown += piece
        assert text.startswith(shown)
    assert (shown, rows[0].text, rows[0].finish) == (text, text, finish)
    assert rows[0].ids == bytes_of(text)


def test_a_stop_text_in_the_prompt_does_not_count(model):
    fake = forced(model, b"ok")
    assert list(npqwen.generate(fake, bytes_of("say <END>"), 2, stop="<END>")) == bytes_of("ok")


def test_a_character_is_shown_when_its_last_byte_has_come(model):
    fake = forced(model, "x\u20ac\U0001f600y".encode())
    options = Options(max_new_tokens=9)
    pieces = [text for _, _, text in stream(fake, new_rows(fake, [PROMPT], options, 0), options)]
    assert [piece for piece in pieces if piece] == ["x", "\u20ac", "\U0001f600", "y"]


def test_rows_that_stop_at_different_steps_do_not_stop_each_other(model):
    prompts = [[72, 105], [1, 2, 3, 4, 5], [9]]
    solo = [npqwen.generate_batch(model, [p], 8, eos=[])[0].ids for p in prompts]
    ends = {solo[0][2], solo[1][5]} - set(solo[2])
    batch = npqwen.generate_batch(model, prompts, 8, eos=ends)
    for row, prompt in zip(batch, prompts, strict=True):
        [alone] = npqwen.generate_batch(model, [prompt], 8, eos=ends)
        assert (row.ids, row.finish, row.ended_by) == (alone.ids, alone.finish, alone.ended_by)
    assert [row.finish for row in batch] == ["eos", "eos", "length"]
    assert len(batch[2].ids) == 8


def test_a_rows_sample_depends_on_its_seed_and_prompt_alone(model):
    prompts = {"a": [72, 105], "b": [1, 2, 3, 4, 5], "c": [9]}
    alone = {
        n: npqwen.generate_batch(model, [p], 10, temperature=1.0, seed=7, eos=[])[0].ids for n, p in prompts.items()
    }
    for order in ("abc", "cab", "bca", "cb"):
        batch = npqwen.generate_batch(model, [prompts[n] for n in order], 10, temperature=1.0, seed=7, eos=[])
        assert [row.ids for row in batch] == [alone[n] for n in order]
    same = npqwen.generate_batch(model, [prompts["a"]] * 2, 10, temperature=1.0, seed=[7, 8], eos=[])
    assert same[0].ids == alone["a"] != same[1].ids
    assert alone["a"] == list(npqwen.generate(model, prompts["a"], 10, temperature=1.0, seed=7, eos=[]))


def test_an_unseeded_row_reports_the_seed_that_repeats_it(model):
    [row] = npqwen.generate_batch(model, [PROMPT], 10, temperature=1.5, eos=[])
    assert list(npqwen.generate(model, PROMPT, 10, temperature=1.5, seed=row.seed, eos=[])) == row.ids


def test_the_lowest_index_wins_ties():
    rng = np.random.default_rng(0)
    assert sample(np.array([3, 7, 7], np.float32), Options(), rng) == 1
    tied = np.array([1, 5, 5, 5], np.float32)
    assert {sample(tied, Options(temperature=1.0, top_k=2), rng) for _ in range(200)} == {1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    rng = np.random.default_rng(0)
    for top_p, want in [(0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]:
        assert {sample(logits, Options(temperature=1.0, top_p=top_p), rng) for _ in range(2000)} == want
    draws = [sample(logits, Options(temperature=1.0), rng) for _ in range(20000)]
    np.testing.assert_allclose(np.bincount(draws) / 20000, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    cold = [sample(logits, Options(temperature=0.05), rng) for _ in range(500)]
    assert np.mean(np.array(cold) == 0) > 0.99


def test_a_repetition_penalty_pushes_every_seen_id_down():
    logits = np.array([2, -2, 2], np.float32)
    np.testing.assert_allclose(penalise(logits, {0, 1}, 1.5), [1.333333, -3.0, 2.0], atol=1e-6)
    assert penalise(logits, {0, 1}, 1.0) is logits


def test_a_penalised_row_equals_its_solo_run(model):
    prompts = [[72, 105], [1, 2, 3, 4, 5]]
    batch = npqwen.generate_batch(model, prompts, 10, repetition_penalty=1.5, eos=[])
    assert [row.ids for row in batch] == [
        list(npqwen.generate(model, p, 10, repetition_penalty=1.5, eos=[])) for p in prompts
    ]


@pytest.mark.parametrize(("prompt", "new", "fits"), [(16, 1, True), (15, 2, True), (17, 1, False), (16, 2, False)])
def test_the_last_token_needs_no_position(tmp_path, prompt, new, fits):
    model = toy.open_toy(tmp_path, max_position_embeddings=16)
    if fits:
        assert len(list(npqwen.generate(model, range(prompt), new))) == new
    else:
        with pytest.raises(UserError, match=f"need {prompt + new - 1} positions; the model has 16"):
            npqwen.generate(model, range(prompt), new)


def test_nan_in_the_logits_stops_with_the_step(model):
    calls = {"n": 0}

    def linear(x, w):
        out = model.ops.linear(x, w)
        if w is model.weights.unembed:
            out[0, 3] = np.nan if calls["n"] == 2 else out[0, 3]
            calls["n"] += 1
        return out

    broken = replace(model, ops=replace(model.ops, linear=linear))
    with pytest.raises(FloatingPointError, match="step 2: the logits hold NaN or Inf"):
        list(npqwen.generate(broken, PROMPT, 5, eos=[]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens -1"),
        ({"temperature": -0.5}, "temperature -0.5"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"stop": ""}, "empty text would end every answer"),
    ],
)
def test_options_that_make_no_sense_are_refused(model, changes, says):
    with pytest.raises(UserError, match=says):
        greedy(model, **changes)


def test_a_stop_text_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="stop texts need a tokenizer"):
        list(npqwen.generate(toy.open_toy(tmp_path), [1, 2], 3, stop="x"))


def test_ids_that_no_tokenizer_knows_are_generated_and_have_no_text(model):
    assert model.tokenizer.decode([259, 65]) == "A"
    assert list(npqwen.generate(model, [259], 1, eos=[]))
    with pytest.raises(UserError, match="token id 260 is outside"):
        npqwen.generate(model, [260])


def test_nothing_is_generated_when_nothing_is_asked_for(model):
    assert greedy(model, max_new_tokens=0) == []
