"""States and their merge, masks as ranges, and who reads which kv head."""

from itertools import pairwise

import numpy as np
import pytest

from npqwen.attention import State, attend, grouped, merge

rng = np.random.default_rng(0)


def random_set(K=2, G=3, T=5, S=11, D=4):
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return draw(K, G, T, D), draw(K, S, D), draw(K, S, D)


def reference(q_KGTD, k_KSD, v_KSD, scale, span_T2, log_weight_KS=None):
    """The same in float64 loops, one query and one key at a time."""
    K, G, T, _ = q_KGTD.shape
    out, lse = np.zeros(q_KGTD.shape), np.full((K, G, T), -np.inf)
    for k in range(K):
        for g in range(G):
            for t in range(T):
                keys = range(*span_T2[t])
                if not len(keys):
                    continue
                score = [float(q_KGTD[k, g, t].astype(np.float64) @ k_KSD[k, s]) * scale for s in keys]
                if log_weight_KS is not None:
                    score = [x + float(log_weight_KS[k, s]) for x, s in zip(score, keys, strict=True)]
                weight = np.exp(score)
                out[k, g, t] = weight @ v_KSD[k, list(keys)] / weight.sum()
                lse[k, g, t] = np.log(weight.sum())
    return out, lse


def test_attend_equals_a_loop_over_keys_for_any_spans_and_weights():
    q, k, v = random_set(T=7)
    span = np.array([[0, 1], [0, 11], [3, 3], [2, 9], [10, 11], [0, 0], [5, 8]])
    weights = rng.standard_normal((2, 11)).astype(np.float32)
    for log_weight in (None, weights):
        got = attend(q, k, v, scale=0.5, span_T2=span, log_weight_KS=log_weight)
        want_out, want_lse = reference(q, k, v, 0.5, span, log_weight)
        assert got.out.dtype == got.lse.dtype == np.float32
        np.testing.assert_allclose(got.out, want_out, atol=1e-6)
        np.testing.assert_allclose(got.lse, want_lse, atol=2e-6)


def test_the_causal_mask_of_new_tokens_over_a_cached_prefix():
    q, k, v = random_set(K=1, G=1, T=2, S=5)
    got = attend(q, k, v, scale=1.0, span_T2=np.array([[0, 4], [0, 5]]))
    first, second = attend(q[:, :, :1], k[:, :4], v[:, :4], scale=1.0), attend(q[:, :, 1:], k, v, scale=1.0)
    np.testing.assert_allclose(got.out, np.concatenate([first.out, second.out], axis=2), atol=1e-6)


def test_a_query_without_keys_gets_zero_and_its_neighbours_are_untouched():
    q, k, v = random_set(T=3)
    span = np.array([[0, 11], [4, 4], [0, 11]])
    with np.errstate(all="raise", under="ignore"):
        got = attend(q, k, v, scale=1.0, span_T2=span)
    assert np.all(got.out[:, :, 1] == 0)
    assert np.all(np.isneginf(got.lse[:, :, 1]))
    alone = attend(q, k, v, scale=1.0)
    np.testing.assert_allclose(got.out[:, :, ::2], alone.out[:, :, ::2], atol=1e-6)
    empty = attend(q, k[:, :0], v[:, :0], scale=1.0)
    assert np.all(empty.out == 0)
    assert np.all(np.isneginf(empty.lse))


def test_values_outside_a_span_may_be_nan_without_leaking():
    q, k, v = random_set(T=4)
    span = np.array([[0, 4], [0, 5], [0, 6], [2, 6]])
    want = attend(q, k, v, scale=1.0, span_T2=span)
    k[:, 6:], v[:, 6:] = np.nan, np.nan
    got = attend(q, k, v, scale=1.0, span_T2=span)
    np.testing.assert_allclose(got.out, want.out, atol=1e-6)
    v[:, 5] = np.nan  # seen by the last two queries, not by the first two
    got = attend(q, k, v, scale=1.0, span_T2=span)
    np.testing.assert_allclose(got.out[:, :, :2], want.out[:, :, :2], atol=1e-6)
    assert np.all(np.isnan(got.out[:, :, 2:]))


def test_large_scores_do_not_overflow():
    q = np.array([[[[1.0]]]], np.float32)
    for scores, want in [
        ([90, 2, -2], [1, 0, 0]),
        ([1000, 1000, 999], [0.422319, 0.422319, 0.155362]),
        ([-1e4, -9999], [0.268941, 0.731059]),
    ]:
        k = np.array(scores, np.float32)[None, :, None]
        v = np.eye(len(scores), dtype=np.float32)[None]
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            got = attend(q, k, v, scale=1.0)
        np.testing.assert_allclose(got.out[0, 0, 0], want, atol=1e-6)


def test_merging_the_states_of_any_partition_gives_the_whole():
    q, k, v = random_set(S=23)
    whole = attend(q, k, v, scale=0.7)
    for _ in range(20):
        cuts = np.sort(rng.integers(0, 24, 4))  # parts may be empty
        bounds = [0, *cuts, 23]
        parts = [attend(q, k[:, a:b], v[:, a:b], scale=0.7) for a, b in pairwise(bounds)]
        rng.shuffle(parts)
        merged = parts[0]
        for part in parts[1:]:
            merged = merge(merged, part)
        np.testing.assert_allclose(merged.out, whole.out, atol=2e-6)
        np.testing.assert_allclose(merged.lse, whole.lse, atol=2e-6)


def test_the_empty_state_is_the_identity_of_merge_and_lse_is_natural():
    q, k, v = random_set()
    state = attend(q, k, v, scale=1.0)
    nothing = State(np.zeros_like(state.out), np.full_like(state.lse, -np.inf))
    with np.errstate(all="raise", under="ignore"):
        for merged in (merge(state, nothing), merge(nothing, state)):
            np.testing.assert_array_equal(merged.out, state.out)
            np.testing.assert_allclose(merged.lse, state.lse, atol=1e-6)
        assert np.all(np.isneginf(merge(nothing, nothing).lse))
    zero = attend(np.zeros((1, 1, 1, 4), np.float32), k[:1], v[:1], scale=1.0)
    assert zero.lse[0, 0, 0] == pytest.approx(np.log(11), abs=1e-6)


@pytest.mark.parametrize(
    ("H", "K", "want"), [(4, 2, [0, 0, 1, 1]), (6, 2, [0, 0, 0, 1, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2])]
)
def test_neighbouring_query_heads_share_a_kv_head(H, K, want):
    v = np.broadcast_to(np.arange(K, dtype=np.float32)[:, None, None], (K, 3, 2))
    q = grouped(rng.standard_normal((H, 1, 2)).astype(np.float32), K)
    state = attend(q, np.zeros((K, 3, 2), np.float32), v, scale=1.0)
    assert state.out.reshape(H, 2)[:, 0].tolist() == want


def test_shapes_that_do_not_fit_are_named():
    q, k, v = random_set()
    with pytest.raises(ValueError, match=r"queries \(2, 3, 5, 4\) do not fit keys \(2, 11, 3\)"):
        attend(q, k[..., :3], v, scale=1.0)
