"""Statistics of paired questions and of texts, as pure functions of counts and of one number a text."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided confidence limits."""

    value: float
    low: float
    high: float


@cache
def mcnemar(b: int, c: int) -> float:
    """Exact two-sided McNemar p for b and c discordant pairs: min(1, 2 P[Bin(b + c, 1/2) <= min(b, c)])."""
    return float(stats.binomtest(min(b, c), b + c).pvalue) if b + c else 1.0


def bonferroni(p: list[float]) -> list[float]:
    return [min(1.0, len(p) * value) for value in p]


def holm(p: list[float]) -> list[float]:
    """Holm's step-down p, in the order given (Scandinavian Journal of Statistics 6, 1979, 65-70)."""
    adjusted, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted


def sign_flip(differences: list[float]) -> float:
    """Exact two-sided p of the mean difference when every text's sign could be flipped; at best 2 / 2^texts."""
    if len(differences) < 2 or not any(differences):
        return 1.0
    test = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=2 ** len(differences)
    )
    return float(test.pvalue)


@cache  # scipy computes a p-value on the way, which costs more than the interval
def wilson(hits: int, n: int, alpha: float = 0.05) -> Interval:
    """A share with Wilson's score interval."""
    low, high = stats.binomtest(hits, n).proportion_ci(1 - alpha, method="wilson")
    return Interval(hits / n, float(low), float(high))


def paired_difference(both: int, only_a: int, only_b: int, neither: int, alpha: float = 0.05) -> Interval:
    """Share of a minus share of b over the same questions, with Newcombe's interval.

    Wilson's limits of the two shares are joined by the correlation phi, whose numerator, if positive, loses n/2.
    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10.
    """
    n = both + only_a + only_b + neither
    a, b = wilson(both + only_a, n, alpha), wilson(both + only_b, n, alpha)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    product = both * neither - only_a * only_b
    covariance = max(product - n / 2, 0.0) if product > 0 else product
    phi = covariance / math.sqrt(margins) if margins else 0.0

    def width(of_a: float, of_b: float) -> float:
        return math.sqrt(max(of_a**2 - 2 * phi * of_a * of_b + of_b**2, 0.0))

    difference = (only_a - only_b) / n
    low, high = width(a.value - a.low, b.high - b.value), width(a.high - a.value, b.value - b.low)
    return Interval(difference, difference - low, difference + high)


def mean_interval(values: list[float], alpha: float = 0.05) -> Interval:
    """The mean of one number a text, with Student's t interval; unbounded for a single text."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf(1 - alpha / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def discordant(a: dict[tuple[int, int], bool], b: dict[tuple[int, int], bool]) -> tuple[int, int, int, int]:
    """(both, only_a, only_b, neither) over the questions, keyed by text and item, that a and b have both answered."""
    pairs = [(a[key], b[key]) for key in a.keys() & b.keys()]
    return (
        sum(x and y for x, y in pairs),
        sum(x and not y for x, y in pairs),
        sum(y and not x for x, y in pairs),
        sum(not x and not y for x, y in pairs),
    )


def by_text(a: dict[tuple[int, int], bool], b: dict[tuple[int, int], bool]) -> dict[int, float]:
    """Share of a minus share of b in each text, over the questions both have answered."""
    texts: dict[int, list[int]] = {}
    for text, item in sorted(a.keys() & b.keys()):
        texts.setdefault(text, []).append(int(a[text, item]) - int(b[text, item]))
    return {text: sum(values) / len(values) for text, values in texts.items()}
