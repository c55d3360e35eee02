"""The kernels of selection choose what their NumPy twins choose, up to ties: on one thread and two, alone and in a batch."""

import numpy as np
import pytest

from kvmem import select
from kvmem.index import Keys, PageBounds, ShortKeys, SignBits, in_blocks, out_of_blocks

kernels = pytest.importorskip("kvmem.kernels")
from npqwen import threads  # noqa: E402

SIZES = (1, 15, 16, 17, 63, 64, 65)
KINDS = ("keys", "signs", "short", "pages")
SHAPES = [(2, 14, 300, 64), (1, 3, 65, 17), (2, 100, 130, 128), (3, 2, 5000, 128), (2, 1, 3000, 80)]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def index_of(kind, k_KMD):
    K, M, D = k_KMD.shape
    match kind:
        case "keys":
            return Keys(k_KMD)
        case "signs":
            return SignBits.of(k_KMD)
        case "short":
            basis_KDr = np.linalg.qr(normal(K, D, D, seed=7))[0][:, :, : min(D, 13)]
            return ShortKeys.of(k_KMD, basis_KDr)
    return PageBounds.of(k_KMD, 8)


def records(K, M, D, seed=1):
    """Keys and values as a view of a longer cache, after its sinks."""
    return normal(K, M + 4, D, seed=seed)[:, 4:], normal(K, M + 4, D, seed=seed + 1)[:, 4:]


@pytest.fixture(params=[1, 2])
def n_threads(request):
    before = threads.workers()
    if request.param > threads.most():
        pytest.skip("one core")
    threads.set_threads(request.param)
    yield request.param
    threads.set_threads(before)


def assert_best(index, q_KRD, k):
    """Scores of what the kernel chose are the best scores: its indices are the twin's, up to ties and rounding."""
    got, want, score = kernels.best(index, q_KRD, k), select.best(index, q_KRD, k), index.scores(q_KRD)
    assert got.shape == want.shape
    assert got.dtype == np.int64
    assert (np.diff(got, axis=-1) > 0).all()
    of_got, of_want = (np.sort(np.take_along_axis(score, i, -1), axis=-1) for i in (got, want))
    np.testing.assert_allclose(of_got, of_want, rtol=0, atol=1e-4)
    assert (got != want).mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "R", "M", "D"), SHAPES)
def test_best_equals_numpy(kind, K, R, M, D, n_threads):
    k_KMD, _ = records(K, M, D)
    index = index_of(kind, k_KMD)
    for k in {1, min(8, index.n_units), min(64, index.n_units), min(300, index.n_units)}:
        assert_best(index, normal(K, R, D), k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", SIZES)
def test_best_equals_numpy_at_awkward_sizes(kind, M):
    for D in (1, 15, 16, 33):
        for R in (1, 5, 7, 49):
            index = index_of(kind, records(2, M, D)[0])
            assert_best(index, normal(2, R, D), index.n_units)
            assert_best(index, normal(2, R, D), 1)


def test_of_equal_scores_the_lowest_indices_are_chosen_whatever_the_length():
    for M in (70, 4000):  # 4000: the units are cut into chunks
        k_KMD = np.ones((1, M, 16), np.float32)
        for kind in KINDS:
            index = index_of(kind, k_KMD)
            for choose in (kernels.best, select.best):
                np.testing.assert_array_equal(choose(index, np.ones((1, 2, 16), np.float32), 5), [[range(5)] * 2])
    k_KMD[0, [100, 2000, 3999]] = 2
    for choose in (kernels.best, select.best):
        chosen = choose(Keys(k_KMD), np.ones((1, 1, 16), np.float32), 5)
        np.testing.assert_array_equal(chosen, [[[0, 1, 100, 2000, 3999]]])


@pytest.mark.parametrize(("K", "R", "M", "D"), SHAPES)
def test_recheck_and_attention_equal_numpy(K, R, M, D, n_threads):
    (k_KMD, v_KMD), q_KRD = records(K, M, D), normal(K, R, D)
    short_KRc = select.best(SignBits.of(k_KMD), q_KRD, min(40, M))
    chosen_KRk = select.recheck(q_KRD, k_KMD, short_KRc, 7)
    np.testing.assert_array_equal(kernels.recheck(q_KRD, k_KMD, short_KRc, 7), chosen_KRk)
    chosen_KRk[:, 0, -1] = -1
    for got, want in zip(
        kernels.attend_chosen(q_KRD, k_KMD, v_KMD, chosen_KRk, D**-0.5),
        select.attend_chosen(q_KRD, k_KMD, v_KMD, chosen_KRk, D**-0.5),
        strict=True,
    ):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_nothing_that_was_not_chosen_is_read():
    (k_KMD, v_KMD), q_KRD = records(2, 200, 32), normal(2, 3, 32)
    short_KRc = np.broadcast_to(np.arange(20, 60, dtype=np.int64), (2, 3, 40))
    want = kernels.attend_chosen(q_KRD, k_KMD, v_KMD, kernels.recheck(q_KRD, k_KMD, short_KRc, 8), 0.2)
    k_KMD[:, 60:], v_KMD[:, :20] = np.nan, np.nan
    got = kernels.attend_chosen(q_KRD, k_KMD, v_KMD, kernels.recheck(q_KRD, k_KMD, short_KRc, 8), 0.2)
    np.testing.assert_array_equal(got[0], want[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_alone_gets_the_same_bits_as_in_a_batch(kind):
    (k_KMD, v_KMD), q_KRD = records(2, 2100, 64), normal(2, 101, 64)
    index = index_of(kind, k_KMD)

    def answer(q_KRD):
        chosen = kernels.recheck(q_KRD, k_KMD, kernels.best(index, q_KRD, 40), 8)
        return chosen, *kernels.attend_chosen(q_KRD, k_KMD, v_KMD, chosen, 0.125)

    together = answer(q_KRD)
    for r in (0, 47, 48, 100):
        for alone, whole in zip(answer(np.ascontiguousarray(q_KRD[:, r : r + 1])), together, strict=True):
            np.testing.assert_array_equal(alone[:, 0], whole[:, r])


@pytest.mark.skipif(threads.most() < 2, reason="one core")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("R", "M"), [(1, 9000), (130, 700)])
def test_one_thread_and_two_give_the_same_bits(kind, R, M):
    (k_KMD, v_KMD), q_KRD = records(3, M, 80), normal(3, R, 80)
    index, answers, before = index_of(kind, k_KMD), [], threads.workers()
    for n in (1, 2, 2):
        threads.set_threads(n)
        try:
            chosen = kernels.best(index, q_KRD, 30)
            answers.append((chosen, *kernels.attend_chosen(q_KRD, k_KMD, v_KMD, chosen, 0.1)))
        finally:
            threads.set_threads(before)
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(two, one)


def test_a_query_of_nan_stays_nan_and_alone():
    (k_KMD, v_KMD), q_KRD = records(1, 100, 16), normal(1, 3, 16)
    q_KRD[0, 1, 3] = np.nan
    for kind in KINDS:
        index = index_of(kind, k_KMD)
        chosen = kernels.best(index, q_KRD, 4)
        out, lse = kernels.attend_chosen(q_KRD, k_KMD, v_KMD, chosen, 0.1)
        assert np.isnan(lse[0, 1])
        assert np.isfinite(lse[0, [0, 2]]).all()
        assert np.isfinite(out[0, [0, 2]]).all()


@pytest.mark.parametrize("M", SIZES)
def test_packed_signs_are_the_signs_one_bit_each(M):
    k_KMD = normal(2, M, 9)
    k_KMD[0, 0, :2] = 0, -0.0
    index = SignBits.of(k_KMD)
    np.testing.assert_array_equal(index.signs(), np.where(k_KMD < 0, -1, 1))
    assert index.nbytes == 2 * -(-M // 64) * 64 * 9 // 8


def test_blocks_are_undone_exactly():
    x_KUx = normal(3, 130, 5)
    assert in_blocks(x_KUx).shape == (3, 3, 5, 64)
    np.testing.assert_array_equal(out_of_blocks(in_blocks(x_KUx), 130), x_KUx)


def test_a_page_bound_is_never_below_a_score_of_its_records():
    k_KMD, q_KRD = normal(2, 37, 8), normal(2, 5, 8)
    bound_KRP, score_KRM = PageBounds.of(k_KMD, 8).scores(q_KRD), Keys(k_KMD).scores(q_KRD)
    for page in range(5):
        assert (bound_KRP[..., page] >= score_KRM[..., 8 * page : 8 * page + 8].max(-1) - 1e-5).all()


def test_an_index_of_ones_own_needs_only_scores():
    class Newest:
        nbytes, n_units = 0, 50

        def scores(self, q_KRD):
            return np.broadcast_to(np.arange(50, dtype=np.float32), (*q_KRD.shape[:2], 50))

    for choose in (kernels.best, select.best):
        np.testing.assert_array_equal(choose(Newest(), normal(1, 2, 4), 3), [[[47, 48, 49]] * 2])


def test_zero_ties_with_minus_zero():
    q, k = np.full((1, 1, 16), 1e-30, np.float32), np.zeros((1, 3, 16), np.float32)
    k[0, 0], k[0, 2] = -1e-30, -1  # the first score underflows, to -0
    np.testing.assert_array_equal(kernels.best(Keys(k), q, 1), [[[0]]])
    np.testing.assert_array_equal(select.best(Keys(k), q, 1), [[[0]]])
