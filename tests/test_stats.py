import itertools
import math

import pytest

from experiments import stats


@pytest.mark.parametrize(("b", "c", "p"), [(24, 10, 0.0243), (15, 9, 0.3075)])
def test_mcnemar_gives_the_published_p(b, c, p):
    assert round(stats.mcnemar(b, c), 4) == p
    assert stats.mcnemar(b, c) == stats.mcnemar(c, b)


@pytest.mark.parametrize("losses", range(21))
def test_a_net_gain_of_28_questions_has_p_below_a_thousandth_for_up_to_20_losses(losses):
    assert stats.mcnemar(28 + losses, losses) < 0.001


def test_mcnemar_is_twice_the_binomial_tail_and_never_above_one():
    for b, c in [(0, 1), (3, 3), (6, 16), (1, 9), (40, 2)]:
        tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
        assert stats.mcnemar(b, c) == pytest.approx(min(1.0, 2 * tail), rel=1e-12)
    assert stats.mcnemar(0, 0) == 1.0


def test_mcnemar_and_newcombe_give_the_worked_example_of_a_textbook():
    """Cavo et al. 2012 in Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, chapter 8."""
    assert stats.mcnemar(6, 16) == pytest.approx(0.052479, abs=5e-7)
    interval = stats.paired_difference(59, 6, 16, 80)
    assert (round(interval.value, 4), round(interval.low, 4), round(interval.high, 4)) == (-0.0621, -0.1186, -0.0046)


def test_newcombe_swaps_its_limits_when_the_arms_are_swapped():
    a_b, b_a = stats.paired_difference(20, 24, 10, 66), stats.paired_difference(20, 10, 24, 66)
    assert (a_b.value, a_b.low, a_b.high) == pytest.approx((-b_a.value, -b_a.high, -b_a.low))


def test_newcombe_stays_inside_bounds_and_open_where_nothing_differs():
    for table in [(0, 0, 0, 120), (120, 0, 0, 0), (0, 120, 0, 0), (0, 0, 120, 0), (60, 0, 0, 60)]:
        interval = stats.paired_difference(*table)
        assert -1 <= interval.low <= interval.value <= interval.high <= 1
    assert stats.paired_difference(60, 0, 0, 60).high > 0.005, "agreement on 120 questions does not prove equality"


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"), [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]
)
def test_wilson_gives_newcombes_worked_examples(hits, n, low, high):
    """Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3."""
    interval = stats.wilson(hits, n)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_bonferroni_and_holm_on_one_family():
    p = [0.0005, 0.0243, 0.0008, 1.0]
    assert stats.bonferroni(p) == pytest.approx([0.002, 0.0972, 0.0032, 1.0])
    assert stats.holm(p) == pytest.approx([0.002, 0.0486, 0.0024, 1.0])


def test_holm_never_lets_a_larger_p_overtake_a_smaller_one():
    assert stats.holm([0.02, 0.03, 0.011]) == pytest.approx([0.04, 0.04, 0.033])


def test_sign_flip_over_six_texts_that_agree_reaches_its_floor():
    assert stats.sign_flip([0.25, 0.3, 0.2, 0.35, 0.1, 0.05]) == 2 / 2**6
    assert round(stats.sign_flip([-1.0] * 6), 3) == 0.031


@pytest.mark.parametrize(
    "twentieths",
    [(5, 6, 4, 7, 2, -1), (1, -1, 2, 2, 2, 2), (0, 1, 1, 1, 1, 1), (3, -3, 1, -1, 0, 0), (4,), (0, 0, 0, 0, 0, 0)],
)
def test_sign_flip_equals_plain_enumeration_with_ties_counted(twentieths):
    flips = [abs(sum(s * d for s, d in zip(signs, twentieths, strict=True))) for signs in _signs(len(twentieths))]
    expected = sum(flip >= abs(sum(twentieths)) for flip in flips) / len(flips)
    assert stats.sign_flip([d / 20 for d in twentieths]) == pytest.approx(expected, abs=1e-12)


def _signs(n):
    return list(itertools.product((1, -1), repeat=n))


def test_the_mean_of_six_texts_has_students_interval():
    interval = stats.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    half = 2.570582 * math.sqrt(3.5 / 6)  # t quantile 0.975 for 5 degrees of freedom
    assert (interval.value, interval.low, interval.high) == pytest.approx((3.5, 3.5 - half, 3.5 + half), abs=1e-6)
    assert math.isinf(stats.mean_interval([1.0]).high), "one text bounds nothing"


def test_pairs_are_the_questions_that_both_arms_answered():
    a = {(1, 0): True, (1, 1): True, (1, 2): False, (2, 0): False, (2, 1): True}
    b = {(1, 0): True, (1, 1): False, (1, 2): True, (2, 0): False}
    assert stats.discordant(a, b) == (1, 1, 1, 1)
    assert stats.by_text(a, b) == {1: 0.0, 2: 0.0}
    assert stats.by_text({(1, 0): True, (1, 1): True}, {(1, 0): False, (1, 1): True}) == {1: 0.5}
