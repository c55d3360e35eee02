"""One matrix for all arms: what must hold for every spec, on a random model and a random text."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import toy

import kvmem
import npqwen
from kvmem.ask import ask_rows, nll_batch
from kvmem.index import BLOCK
from kvmem.mix import remaining
from kvmem.reading import Settings
from npqwen.attention import attend as exact_attend
from npqwen.attention import grouped, merge
from npqwen.errors import UserError

N = 150  # tokens of the text
BUDGETED = ["recent/4", "random/4", "centroid/4", "ffit/4", "frand/4"]
SELECTORS = ["exact:8", "sign:8", "lowrank4:8", "lowrank4:24:8", "quest8:3", "random:8"]
FUNCTIONS = ["centroid/4", "ffit/4", "frand/4"]
MIXES = [f"{selector}+{function}" for selector in SELECTORS for function in FUNCTIONS]
ALL = ["full", "none", *BUDGETED, *SELECTORS, *MIXES]
QUESTIONS = [[5, 6, 7], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module", params=["numpy", "numba"])
def model(request, tmp_path_factory):
    return toy.open_toy(tmp_path_factory.mktemp("toy"), kernels=request.param, seed=6, vocab_size=97)


@pytest.fixture(scope="module")
def reading(model):
    return kvmem.read(model, np.random.default_rng(7).integers(0, 97, N))


@pytest.fixture(scope="module")
def future(model, reading):
    """Rotated queries after the text, fresh: of another text's tokens, none of them seen by a fit."""
    other = kvmem.read(model, np.random.default_rng(99).integers(0, 97, 40))
    from npqwen import layers

    rotation = layers.rotation(model.config, N + np.arange(40))
    return [layers.rope(other.q[layer], *rotation) for layer in range(model.config.n_layers)]


def states(memory, queries):
    return [kvmem.attend(memory, layer, q) for layer, q in enumerate(queries)]


def assert_same(a, b, atol=1e-5):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one.out, other.out, rtol=0, atol=atol)
        np.testing.assert_allclose(one.lse, other.lse, rtol=0, atol=atol)


def exact_states(model, reading, queries, start=0):
    result = []
    for layer, q in enumerate(queries):
        k, v = reading.k[layer][:, start:], reading.v[layer][:, start:]
        state = exact_attend(grouped(q, model.config.n_kv_heads), k, v, scale=model.config.scale)
        result.append(kvmem.State(state.out.reshape(q.shape), state.lse.reshape(q.shape[:2])))
    return result


@pytest.mark.parametrize("spec", ALL)
def test_a_spec_prints_as_itself(spec):
    assert str(kvmem.parse(spec)) == spec
    assert kvmem.parse(str(kvmem.parse(spec))) == kvmem.parse(spec)


@pytest.mark.parametrize("spec", ALL)
def test_answers_are_states_of_the_right_shape_and_finite(spec, model, reading, future):
    for q, state in zip(future, states(kvmem.build(spec, reading), future), strict=True):
        assert state.out.shape == q.shape
        assert state.lse.shape == q.shape[:2]
        assert state.out.dtype == state.lse.dtype == np.float32
        assert np.isfinite(state.out).all()
        assert np.isfinite(state.lse).all()  # the sinks are always there


WHOLE = [
    *["full", "recent/1", "random/1", f"exact:{N - 4}", f"sign:{N - 4}", f"lowrank4:{N - 4}"],
    *[f"lowrank8:{N - 4}:{N - 4}", f"random:{N - 4}", "quest8:19", f"exact:{N - 4}+centroid/4"],
    f"sign:{N - 4}+centroid/2",
]


@pytest.mark.parametrize("spec", WHOLE)
def test_all_records_are_exact_attention(spec, model, reading, future):
    assert_same(states(kvmem.build(spec, reading), future), exact_states(model, reading, future))


@pytest.mark.parametrize("spec", [f"exact:{N - 4}+ffit/4", f"sign:{N - 4}+frand/4"])
def test_a_function_that_overstates_the_mass_adds_only_what_it_overstates(spec, model, reading, future):
    # ffit's lse is a centroid's, never above the exact one; frand's is fitted and may be. Where it is not, k = m is exact.
    memory = kvmem.build(spec, reading)
    for layer, q in enumerate(future):
        q_KGTD = grouped(q, model.config.n_kv_heads)
        mixed, part = memory.parts[layer].state(q_KGTD), memory.parts[layer]
        records, function = part.selected.state(q_KGTD), part.function.state(q_KGTD)
        honest = function.lse <= records.lse
        np.testing.assert_allclose(mixed.out[honest], records.out[honest], atol=1e-6)
        np.testing.assert_allclose(mixed.lse, np.maximum(records.lse, function.lse), atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_mix_adds_the_functions_remaining_mass_and_counts_nothing_twice(selector, function, model, reading, future):
    memory = kvmem.build(f"{selector}+{function}", reading)
    records = kvmem.build(selector, reading)
    alone = kvmem.build(function, reading)
    for layer, q in enumerate(future):
        q_KGTD = grouped(q, model.config.n_kv_heads)
        got = memory.parts[layer].state(q_KGTD)
        r, f = records.parts[layer].state(q_KGTD), alone.parts[layer].state(q_KGTD)
        z_r, z_f = np.exp(r.lse.astype(np.float64)), np.exp(f.lse.astype(np.float64))
        z_rest = np.maximum(z_f - z_r, 0)
        want = (z_r[..., None] * r.out + z_rest[..., None] * f.out) / (z_r + z_rest)[..., None]
        np.testing.assert_allclose(got.out, want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(got.lse, np.log(z_r + z_rest), rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_selected_record_leaves_the_function_alone(function, model, reading, future):
    from kvmem.mix import Mixed

    alone = kvmem.build(function, reading)
    nothing = kvmem.build("none", reading)
    for layer, q in enumerate(future):
        q_KGTD = grouped(q, model.config.n_kv_heads)
        got = Mixed(nothing.parts[layer], alone.parts[layer]).state(q_KGTD)
        want = alone.parts[layer].state(q_KGTD)
        np.testing.assert_allclose(got.out, want.out, rtol=0, atol=1e-6)
        np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=1e-6)


def test_remaining_mass_stays_in_log_space():
    function, records = (
        np.array([700, -700, 5, -np.inf, 5], np.float32),
        np.array([699, -701, 5, 3, -np.inf], np.float32),
    )
    with np.errstate(all="raise", under="ignore"):
        got = remaining(function, records)
    want = np.log(1 - np.exp(-1))
    np.testing.assert_allclose(got[:2], [700 + want, -700 + want], rtol=1e-6)
    assert np.isneginf(got[2:4]).all()
    assert got[4] == 5


@pytest.mark.parametrize("spec", ALL)
def test_sinks_are_exact_in_every_arm(spec, model, reading, future):
    memory, n_sinks = kvmem.build(spec, reading), Settings().n_sinks
    for layer, q in enumerate(future):
        q_KGTD = grouped(q, model.config.n_kv_heads)
        k, v = reading.k[layer][:, :n_sinks], reading.v[layer][:, :n_sinks]
        sinks = exact_attend(q_KGTD, k, v, scale=model.config.scale)
        want = merge(sinks, memory.parts[layer].state(q_KGTD))
        got = kvmem.attend(memory, layer, q)
        np.testing.assert_allclose(got.out, want.out.reshape(q.shape), rtol=0, atol=1e-6)
        np.testing.assert_allclose(got.lse, want.lse.reshape(q.shape[:2]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", [*BUDGETED, "none"])
def test_stored_bytes_are_within_the_budget_and_close_to_it(spec, model, reading):
    memory = kvmem.build(spec, reading)
    budget = memory.full_bytes // 4 if spec != "none" else 0
    assert memory.stored_bytes <= budget
    if spec != "none":
        per_layer_head = (2 * model.config.head_dim + 1) * 4  # less than one more record or cluster would fit
        assert memory.stored_bytes > budget - model.config.n_layers * model.config.n_kv_heads * per_layer_head


def arrays_of(part):
    return [value for name in part.__dataclass_fields__ if isinstance(value := getattr(part, name), np.ndarray)]


@pytest.mark.parametrize("spec", ["full", "none", "recent/4", "random/4", "centroid/4", "ffit/4"])
def test_stored_bytes_is_the_sum_of_what_is_kept(spec, reading):
    memory = kvmem.build(spec, reading)
    assert memory.stored_bytes == sum(array.nbytes for part in memory.parts for array in arrays_of(part))


def test_frand_stores_values_and_one_scale_a_head(model, reading):
    memory = kvmem.build("frand/4", reading)
    K = model.config.n_kv_heads
    assert memory.stored_bytes == sum(part.values_KCX.nbytes + 4 * K for part in memory.parts)


@pytest.mark.parametrize("spec", ALL)
def test_the_same_seed_gives_the_same_memory(spec, reading, future):
    assert_same(states(kvmem.build(spec, reading, 3), future), states(kvmem.build(spec, reading, 3), future), atol=0)


@pytest.mark.parametrize("spec", ["random/4", "centroid/4", "ffit/4", "frand/4", "random:8"])
def test_another_seed_gives_another_memory(spec, reading, future):
    a, b = kvmem.build(spec, reading, 3), kvmem.build(spec, reading, 4)
    assert np.abs(states(a, future)[0].out - states(b, future)[0].out).max() > 1e-4


@pytest.mark.parametrize("spec", ALL)
def test_questions_do_not_see_each_other(spec, model, reading):
    memory = kvmem.build(spec, reading)
    alone = [ask_rows(model, memory, [q], 5)[0].ids for q in QUESTIONS]
    for order in ([0, 1, 2], [2, 0, 1]):
        assert [row.ids for row in ask_rows(model, memory, [QUESTIONS[i] for i in order], 5)] == [
            alone[i] for i in order
        ]


@pytest.mark.parametrize("spec", ["full", "ffit/4", "sign:8+ffit/4", "lowrank4:24:8"])
def test_two_texts_in_a_row_equal_each_alone(spec, model, future):
    texts = [np.random.default_rng(seed).integers(0, 97, N) for seed in (21, 22)]
    alone = [states(kvmem.build(spec, kvmem.read(model, ids)), future) for ids in texts]
    readings = [kvmem.read(model, ids) for ids in texts]
    together = [kvmem.build(spec, one) for one in readings]
    for _ in range(2):
        for memory, want in zip(together, alone, strict=True):
            ask_rows(model, memory, QUESTIONS, 3)
            assert_same(states(memory, future), want, atol=0)


def test_full_is_plain_attention_in_logits_answers_and_likelihood(model, reading):
    memory = kvmem.build("full", reading)
    for question in QUESTIONS:
        want = npqwen.logits(model, [*reading.ids, *question])[N:]
        loss = kvmem.nll(model, memory, question)
        assert loss.shape == (len(question) - 1,)
        assert loss.dtype == np.float32
        log_p = (
            want - np.log(np.exp(want - want.max(1, keepdims=True)).sum(1, keepdims=True)) - want.max(1, keepdims=True)
        )
        np.testing.assert_allclose(loss, [-log_p[i, token] for i, token in enumerate(question[1:])], rtol=0, atol=1e-4)
        answer = list(npqwen.generate(model, [*reading.ids, *question], 6))
        assert ask_rows(model, memory, [question], 6)[0].ids == answer


def test_several_likelihoods_at_once_equal_each_alone(model, reading):
    memory = kvmem.build("sign:8", reading)
    for got, question in zip(nll_batch(model, memory, QUESTIONS), QUESTIONS, strict=True):
        np.testing.assert_allclose(got, kvmem.nll(model, memory, question), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ALL)
def test_a_failing_question_leaves_the_memory_as_it_was(spec, model, reading, future):
    memory = kvmem.build(spec, reading)
    before = states(memory, future)
    with pytest.raises(UserError):
        ask_rows(model, memory, [[1, 2], [97]], 3)

    def fail(attend):
        def failing(layer, q, k, v):
            if layer == 1:
                raise RuntimeError("in the middle of a layer")
            return attend(layer, q, k, v)

        return failing

    with pytest.raises(RuntimeError, match="middle"):
        ask_rows(model, memory, QUESTIONS, 3, around=fail)
    assert_same(states(memory, future), before, atol=0)


def test_memories_and_readings_cannot_be_changed(reading):
    memory = kvmem.build("ffit/4", reading)
    with pytest.raises(FrozenInstanceError):
        memory.parts = ()
    with pytest.raises(ValueError, match="read-only"):
        reading.k[0][0, 0, 0] = 1


def test_a_fit_sees_nothing_after_the_text(model, reading, future):
    """The same text as the beginning of a longer one: arms built on it are equal, whatever comes later."""
    longer = kvmem.read(model, np.append(reading.ids, [9, 9, 9, 9]))
    for layer in range(model.config.n_layers):
        np.testing.assert_allclose(longer.k[layer][:, :N], reading.k[layer], atol=1e-5)
        np.testing.assert_allclose(longer.q[layer][:, :N], reading.q[layer], atol=1e-5)
    poisoned = kvmem.Reading(
        model,
        reading.ids,
        tuple(k[:, :N] for k in longer.k),
        tuple(v[:, :N] for v in longer.v),
        tuple(q[:, :N] for q in longer.q),
    )
    for spec in ("ffit/4", "frand/4", "centroid/4", "lowrank4:24:8"):
        assert_same(states(kvmem.build(spec, poisoned), future), states(kvmem.build(spec, reading), future), atol=2e-3)


def test_the_reading_keeps_queries_before_rotation(tmp_path):
    """YaRN stretches what it rotates; undoing it has to shrink again."""
    from npqwen import layers
    from npqwen.model import heads

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    with pytest.warns(UserWarning, match="YaRN"):
        model = toy.open_toy(tmp_path, seed=2, rope_parameters=yarn)
    ids = np.arange(20)
    reading = kvmem.read(model, ids)
    w = model.weights.layers[0]
    h = layers.rms_norm(layers.embed(model.weights.embed, ids), w.input_norm, model.config.eps)
    want = layers.rms_norm(heads(layers.linear(h, w.q), model.config.n_heads), w.q_norm, model.config.eps)
    np.testing.assert_allclose(reading.q[0], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fulll", "arm 'fulll' is unknown; here one of full, none, recent/f"),
        ("ffit", "arm 'ffit' is unknown"),
        ("ffit/0", "arm 'ffit/0' is unknown"),
        (
            "sign:8+recent/4",
            r"'recent/4' in arm 'sign:8\+recent/4' is unknown; here one of centroid/f, ffit/f, frand/f",
        ),
        ("ffit/8+sign:8", "'ffit/8' in arm"),
        ("sign:147", r"sign:147: 147 records asked for, the text has 146"),
        ("lowrank9:8", "lowrank9:8: rank 9 exceeds head_dim 8"),
        ("lowrank4:4:8", "a shortlist of 4 cannot hold 8"),
        ("lowrank4:147:8", "147 records asked for"),
        ("quest8:20", "146 records make 19 pages of 8, not 20"),
        ("centroid/146", "leaves 0 clusters of 146 records"),
        ("recent/147", "leaves 0 records of 146"),
        ("sign:8+ffit/200", "leaves 0 clusters"),
    ],
)
def test_an_impossible_spec_is_one_line(spec, says, reading):
    with pytest.raises(UserError, match=says) as caught:
        kvmem.build(spec, reading)
    assert "\n" not in str(caught.value)


def test_texts_and_questions_that_cannot_be_are_refused(model, reading, tmp_path):
    with pytest.raises(UserError, match="4 tokens and 4 sinks leave no record"):
        kvmem.build("full", kvmem.read(model, [1, 2, 3, 4]))
    with pytest.raises(UserError, match="the text has 513 tokens; the model has 512"):
        kvmem.read(model, np.zeros(513, int))
    with pytest.raises(UserError, match="seed -1: a whole number"):
        kvmem.build("full", reading, -1)
    with pytest.raises(UserError, match="a list of questions is needed"):
        kvmem.ask(model, kvmem.build("full", reading), "Who?")
    assert kvmem.attend(kvmem.build("quest8:3", reading), 0, reading.q[0][:, :0]).out.shape[1] == 0
    with pytest.raises(UserError, match="no token ids"):
        ask_rows(model, kvmem.build("full", reading), [[]])
    full = kvmem.read(model, np.zeros(510, int))
    with pytest.raises(UserError, match=r"text and question need 520 positions; the model has 512"):
        ask_rows(model, kvmem.build("full", full), [[1, 2, 3]], 8)
    other = toy.open_toy(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="the memory was read with"):
        ask_rows(other, kvmem.build("full", reading), [[1]])
    sliding = toy.open_toy(tmp_path / "sliding", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(UserError, match="layer 1 has a sliding window"):
        kvmem.read(sliding, [1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(4, 3, 7\), this model needs float32 \(4, T, 8\)"):
        kvmem.attend(kvmem.build("full", reading), 0, np.zeros((4, 3, 7), np.float32))


@pytest.mark.parametrize(
    ("spec", "percent"),
    [
        ("full", 100),
        ("none", 0),
        ("recent/8", 12.5),
        ("exact:8", 50.2),
        ("sign:8", 1 / 64 * 100 + 0.4),
        ("lowrank16:8", 6.25 + 0.4),
        ("lowrank16:64:8", 8.05),
        ("quest16:4", 6.25 + 3.2),
        ("random:8", 0.4),
        ("sign:8+ffit/8", 1 / 64 * 100 + 0.4 + 249 * 257 / (2000 * 256) * 100),
    ],
)
def test_reads_are_the_published_arithmetic(spec, percent):
    assert kvmem.parse(spec).reads(2000, 128) == pytest.approx(percent / 100)


def test_no_arm_reads_more_records_than_there_are():
    assert kvmem.parse("quest8:19").reads(N - 4, 128) == 1 / 8 + 1  # 19 pages of 8 are 152, 146 exist


@pytest.mark.parametrize(
    ("spec", "units", "unit_bytes"), [("sign:8", N - 4, 1), ("lowrank4:8", N - 4, 4 * 4), ("quest8:3", 19, 2 * 8 * 4)]
)
def test_a_selector_stores_the_cache_and_its_index_in_whole_blocks(spec, units, unit_bytes, model, reading):
    memory, config = kvmem.build(spec, reading), model.config
    heads = config.n_layers * config.n_kv_heads
    basis_bytes = 4 * config.head_dim * 4 if "lowrank" in spec else 0
    index_bytes = -(-units // BLOCK) * BLOCK * unit_bytes
    assert memory.stored_bytes == memory.full_bytes + heads * (index_bytes + basis_bytes)
    assert kvmem.build("exact:8", reading).stored_bytes == memory.full_bytes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_sinks": -1}, "n_sinks -1: a whole number of 0 or more"),
        ({"n_sinks": 2.0}, "n_sinks 2.0"),
        ({"horizon": 0}, "horizon 0: a whole number of 1 or more"),
        ({"n_fit": 0}, "n_fit 0"),
        ({"ridge": 0}, "ridge 0: a number above 0"),
        ({"ridge": float("nan")}, "ridge nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        Settings(**changes)


def test_no_sinks_are_possible(model, reading, future):
    for spec, want in (("full", exact_states(model, reading, future)), ("sign:8", None)):
        got = states(kvmem.build(spec, reading, settings=Settings(n_sinks=0)), future)
        assert_same(got, want) if want else None
        assert all(np.isfinite(state.out).all() for state in got)


def test_what_is_no_spec_no_question_and_no_query_is_said_in_words(model, reading):
    memory = kvmem.build("full", reading)
    for spec in (None, 5, ["ffit/8"]):
        with pytest.raises(UserError, match="a spec in words is needed"):
            kvmem.build(spec, reading)
    with pytest.raises(UserError, match="is unknown"):
        kvmem.build("ffit/" + "9" * 5000, reading)
    with pytest.raises(UserError, match="a list of questions is needed, not int"):
        kvmem.ask(model, memory, 5)
    with pytest.raises(UserError, match="lists of different lengths"):
        kvmem.read(model, [[1, 2], [3]])
    assert nll_batch(model, memory, []) == []
    q = reading.q[0][:, :2]
    np.testing.assert_array_equal(kvmem.attend(memory, 0, q.tolist()).out, kvmem.attend(memory, 0, q).out)
    with pytest.raises(ValueError, match="complex64"):
        kvmem.attend(memory, 0, q.astype(np.complex64))
    with pytest.raises(ValueError, match="no layer 3, this model has 3, from 0"):
        kvmem.attend(memory, 3, q)


def test_a_memory_belongs_to_a_model_not_to_a_path(model, reading, tmp_path):
    from dataclasses import replace

    memory = kvmem.build("full", reading)
    link = tmp_path / "link"
    link.symlink_to(model.folder)
    assert len(kvmem.nll(npqwen.load(link, kernels=model.ops.name), memory, [1, 2])) == 1
    other = replace(model, config=replace(model.config, eps=1e-3))
    with pytest.raises(UserError, match="the memory was read with"):
        kvmem.nll(other, memory, [1, 2])
