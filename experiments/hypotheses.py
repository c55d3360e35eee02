"""Each hypothesis of the three protocols against the rows: supported, falsified or open, as PROTOCOL.md fixes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.decide import Comparison, compare, counts, decide
from experiments.evidence import Evidence

SUPPORTED, FALSIFIED, OPEN, NOT_COUNTED = "supported", "falsified", "open", "not counted"
WELL_UNDER_ALL = 0.95  # E2, hypothesis 5: the share of the true top 8 from which on it falls


NEGATIVE = {"e0": (1, 2, 3), "e1": (4,), "e2": ()}  # hypotheses whose support is a negative result


@dataclass(frozen=True)
class Finding:
    number: int
    claim: str
    subject: str
    status: str
    evidence: str


def judge(evidence: Evidence) -> list[Finding]:
    """The findings of an experiment, in the order of its PROTOCOL.md; none where rows are missing.

    Nothing is supported or falsified by a model that the control of the decision rule does not count.
    """
    hypotheses = {"e0": _e0, "e1": _e1, "e2": _e2}.get(evidence.protocol.name)
    found = hypotheses(evidence) if hypotheses else []  # the long texts declare none
    return found if counts(evidence) else [replace(one, status=NOT_COUNTED) for one in found]


def is_negative(experiment: str, finding: Finding) -> bool:
    """Whether this is bad news: support for a hypothesis that something fails, or the fall of one that it works."""
    return finding.status == (SUPPORTED if finding.number in NEGATIVE[experiment] else FALSIFIED)


def shown(one: Comparison) -> str:
    """The difference with its interval, in points or nats."""
    scale, digits, unit = (1, 3, "nats") if one.is_nll else (100, 1, "points")
    value, low, high = (
        f"{scale * x:+.{digits}f}" for x in (one.difference.value, one.difference.low, one.difference.high)
    )
    part = ", preliminary" if one.n < one.n_declared else ""
    interval = f"[{low}, {high}]" if math.isfinite(one.difference.low) else "[one text: no interval]"
    return f"{value} {unit} {interval}{part}"


def _each(number: int, claim: str, found: list[Comparison], status: Callable[[Comparison], str]) -> list[Finding]:
    return [Finding(number, claim, f"{one.a} - {one.b}", status(one), shown(one)) for one in found]


def _lifts(one: Comparison) -> str:
    return {"more": SUPPORTED, "less": FALSIFIED, "within": FALSIFIED}.get(one.verdict, OPEN)


def _lowers(one: Comparison) -> str:
    return {"lower": SUPPORTED, "higher": FALSIFIED}.get(one.verdict, OPEN)


def _e0(evidence: Evidence) -> list[Finding]:
    margin = evidence.protocol.decision.margin
    against_full, against_none, invented, copying = (decide(evidence, f) for f in evidence.protocol.families)

    def fails(one: Comparison) -> str:
        if one.difference.high > -margin:
            return FALSIFIED
        return SUPPORTED if one.verdict == "less" else OPEN

    def at_floor(one: Comparison) -> str:
        if one.difference.high <= margin:
            return SUPPORTED
        return FALSIFIED if one.verdict == "more" else OPEN

    return [
        *_each(1, "the function cannot replace the cache", against_full, fails),
        *_each(2, "the function keeps almost no fact", against_none, at_floor),
        *_each(3, "the loss is not silent: more invented numbers", invented, _lifts),
        *_each(4, "fitting copies better than averaging", copying, _lowers),
    ]


def _e1(evidence: Evidence) -> list[Finding]:
    margin = evidence.protocol.decision.margin
    recall, copying = (decide(evidence, f) for f in evidence.protocol.families)
    gain = {one.b: one for one in recall}
    smaller = []
    for k in (8, 16):
        sign, exact = gain.get(f"sign:{k}"), gain.get(f"exact:{k}")
        if sign and exact:
            fallen = exact.difference.value >= sign.difference.value or (k == 16 and exact.difference.low > margin)
            holds = k == 8 or exact.difference.high < margin
            status = FALSIFIED if fallen else SUPPORTED if holds else OPEN
            words = f"exact {shown(exact)}, sign {shown(sign)}"
            smaller.append(Finding(2, "with exact selection the gain is smaller", f"k = {k}", status, words))
    selectors = [one for k in (8, 16) if (one := compare(evidence, f"sign:{k}", f"exact:{k}", "recall"))]
    return [
        *_each(1, "the function lifts the crude selector", [one for one in recall if one.b.startswith("sign")], _lifts),
        *smaller,
        *_each(3, "the function lowers the copy NLL", copying, _lowers),
        *_each(
            4,
            "sign bits select badly",
            selectors,
            lambda one: FALSIFIED if one.difference.high > -margin else SUPPORTED,
        ),
    ]


def _e2(evidence: Evidence) -> list[Finding]:
    margin, strong = evidence.protocol.decision.margin, "lowrank16:64:8"
    recall, ceiling, recheck, copying = (decide(evidence, f) for f in evidence.protocol.families)

    def keeps(one: Comparison) -> str:
        if one.difference.low > -margin:
            return SUPPORTED
        return FALSIFIED if one.verdict == "less" and one.difference.high < -margin else OPEN

    def small(one: Comparison) -> str:
        low, high = one.difference.low, one.difference.high
        if -margin < low and high < margin:
            return SUPPORTED
        return FALSIFIED if low > margin or high < -margin else OPEN

    share = [
        sum(values) / len(values)
        for values in [[r["value"]["top8_share"] for r in evidence.of("selection", strong) if r["text"] == 1]]
        if values
    ]
    return [
        *_each(1, "a shortlist with a re-check recalls like full attention", ceiling, keeps),
        *_each(2, "the re-check is what matters", recheck, _lifts),
        *_each(3, "the function lifts weak selectors", [o for o in recall if o.b in ("sign:8", "quest16:4")], _lifts),
        *_each(4, "its gain on the good selector is small", [o for o in recall if o.b == strong], small),
        *_each(4, "yet it lowers that selector's copy NLL", [o for o in copying if o.b == strong], _lowers),
        *(
            Finding(
                5,
                "recall does not need the whole true top 8",
                f"{strong}, text 1",
                FALSIFIED if value >= WELL_UNDER_ALL else SUPPORTED,
                f"{100 * value:.1f} % of the true top 8 found",
            )
            for value in share
        ),
    ]
