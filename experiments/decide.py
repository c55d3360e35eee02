"""The decision rule of the protocols, applied to rows: a comparison of two arms, and the verdict on it."""

import math
from dataclasses import dataclass, replace

from experiments import stats
from experiments.evidence import Evidence
from experiments.protocol import NLL_MEASURES, Decision, Family
from experiments.stats import Interval


@dataclass(frozen=True)
class Comparison:
    """Arm a minus arm b in one measure. For an NLL, `gained`, `lost` and `p` do not apply, and `n` counts texts."""

    a: str
    b: str
    measure: str
    difference: Interval
    texts: dict[int, float]
    flip: float
    n: int
    n_declared: int
    gained: int = 0
    lost: int = 0
    p: float = math.nan
    bonferroni: float = math.nan
    holm: float = math.nan
    verdict: str = ""

    @property
    def is_nll(self) -> bool:
        return self.measure in NLL_MEASURES


def compare(evidence: Evidence, a: str, b: str, measure: str) -> Comparison | None:
    """The comparison over what both arms have answered, without a verdict; None if that is nothing."""
    declared, alpha = evidence.protocol, evidence.protocol.decision.alpha
    if measure in NLL_MEASURES:
        of_a, of_b = evidence.nll(a, measure), evidence.nll(b, measure)
        texts = {text: of_a[text] - of_b[text] for text in sorted(of_a.keys() & of_b.keys())}
        if not texts:
            return None
        values = list(texts.values())
        interval, flip = stats.mean_interval(values, alpha), stats.sign_flip(values)
        return Comparison(a, b, measure, interval, texts, flip, len(texts), declared.n_texts)
    hits_a, hits_b = evidence.answers(a, measure), evidence.answers(b, measure)
    both, gained, lost, neither = stats.discordant(hits_a, hits_b)
    n = both + gained + lost + neither
    if not n:
        return None
    interval = stats.paired_difference(both, gained, lost, neither, alpha)
    texts = stats.by_text(hits_a, hits_b)
    flip, p = stats.sign_flip(list(texts.values())), stats.mcnemar(gained, lost)
    n_declared = declared.n_texts * declared.n_facts
    return Comparison(a, b, measure, interval, texts, flip, n, n_declared, gained, lost, p)


def decide(evidence: Evidence, family: Family) -> list[Comparison]:
    """The declared pairs of a family that have rows. The correction counts all declared pairs, present or not."""
    found = [one for a, b in family.pairs if (one := compare(evidence, a, b, family.measure))]
    absent = [1.0] * (len(family.pairs) - len(found))
    p = [one.p for one in found] + absent
    if family.measure not in NLL_MEASURES:
        corrected = zip(found, stats.bonferroni(p), stats.holm(p), strict=False)
        found = [replace(one, bonferroni=b, holm=h) for one, b, h in corrected]
    return [replace(one, verdict=verdict(one, evidence.protocol.decision)) for one in found]


def verdict(one: Comparison, rule: Decision) -> str:
    """more, less, within, lower, higher or undecided: the words of the protocols' decision rules."""
    if one.is_nll:
        if one.flip >= rule.alpha:
            return "undecided"
        return "lower" if one.difference.value < 0 else "higher"
    low, high = one.difference.low, one.difference.high
    if one.bonferroni < rule.alpha and (low > 0 or high < 0):
        return "more" if low > 0 else "less"
    return "within" if -rule.margin < low and high < rule.margin else "undecided"


def in_words(one: Comparison, rule: Decision) -> str:
    """The verdict as a reader needs it, with what the interval rules out and what the verdict does not rest on."""
    points, notes = f"{100 * rule.margin:g} points", []
    words = f"within {points}" if one.verdict == "within" else one.verdict
    if not one.is_nll:
        if one.verdict in ("less", "undecided") and one.difference.low > -rule.margin:
            notes.append(f"no loss above {points}")
        if one.verdict in ("more", "undecided") and one.difference.high < rule.margin:
            notes.append(f"no gain above {points}")
        if one.verdict in ("more", "less") and one.flip >= rule.alpha:
            notes.append("not carried by the texts")
    if one.n < one.n_declared:
        notes.append(f"preliminary, {one.n} of {one.n_declared} {'texts' if one.is_nll else 'questions'}")
    return words + (f" ({'; '.join(notes)})" if notes else "")


def gap(evidence: Evidence) -> Comparison | None:
    """Full minus none in recall: a model counts only if this reaches `min_gap`."""
    return compare(evidence, "full", "none", "recall")


def counts(evidence: Evidence) -> bool:
    control = gap(evidence)
    return control is not None and control.difference.value >= evidence.protocol.decision.min_gap


def undeclared(evidence: Evidence) -> list[tuple[str, str]]:
    """Pairs that no family declares: a function against none, a selector against `exact`, every arm against `full`."""
    arms = evidence.arms
    declared = {pair for family in evidence.protocol.families for pair in family.pairs}
    pairs = []
    for arm in arms:
        base, _, function = arm.partition("+")
        if function and base in arms:
            pairs.append((arm, base))
        exact = f"exact:{base.rpartition(':')[2]}"
        if not function and ":" in base and exact in arms and exact != arm:
            pairs.append((arm, exact))
    pairs += [(arm, "full") for arm in arms if arm not in ("full", "none")] if "full" in arms else []
    return [pair for pair in dict.fromkeys(pairs) if pair not in declared]
