"""The numbers behind tables and charts: each derives from the rows of one arm."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from experiments import stats
from experiments.evidence import Evidence


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def share(evidence: Evidence, arm: str, measure: str) -> stats.Interval | None:
    answers = list(evidence.answers(arm, measure).values())
    return stats.wilson(sum(answers), len(answers), evidence.protocol.decision.alpha) if answers else None


def stored_share(evidence: Evidence, arm: str) -> float | None:
    """Stored bytes as a share of what `full` stores, over the texts that have both."""
    full = {r["text"]: r["value"]["stored_bytes"] for r in evidence.of("memory", "full") if r["value"]}
    own = {r["text"]: r["value"]["stored_bytes"] for r in evidence.of("memory", arm) if r["value"]}
    return mean([own[text] / full[text] for text in own.keys() & full.keys() if full[text]])


def layers(evidence: Evidence, arm: str, key: str) -> dict[int, float]:
    """A selection measure per layer, the mean over texts."""
    found: dict[int, list[float]] = {}
    for row in evidence.of("selection", arm):
        if row["value"] and row["value"].get(key) is not None:
            found.setdefault(row["item"], []).append(row["value"][key])
    return {layer: fmean(found[layer]) for layer in sorted(found)}


def lse_error(evidence: Evidence, arm: str) -> dict[int, float]:
    """Mean error of the log mass per layer, over texts; estimate minus truth, nats. Empty for an arm without mass."""
    lists = evidence.values("memory", arm, "lse_error")
    known = ([error for error in column if error is not None] for column in zip(*lists, strict=True))
    return {layer: fmean(errors) for layer, errors in enumerate(known) if errors}


def seconds(evidence: Evidence, arm: str) -> float | None:
    """Measured seconds of the median text, all rows of the arm that carry a time: a run may have been paused in others."""
    texts: dict[int, float] = {}
    for row in (row for (_, a), rows in evidence.by_kind.items() if a == arm for row in rows):
        if row["seconds"] is not None:
            texts[row["text"]] = texts.get(row["text"], 0.0) + row["seconds"]
    return median(texts.values()) if texts else None


def fabrications(evidence: Evidence, n: int = 3) -> list[dict[str, Any]]:
    """Fabricated answers, to questions that `full` answered right if there are such, spread over arms and texts."""
    right = evidence.answers("full", "correct")
    rows = [r for arm in evidence.arms for r in evidence.of("question", arm) if r["outcome"] == "fabricated"]
    rows.sort(key=lambda row: (row["arm"] == "none", not right.get((row["text"], row["item"]), False)))
    chosen: list[dict[str, Any]] = []
    for fresh in (("arm", "text"), ("arm",), ()):
        for row in rows:
            taken = any(row is one or any(row[key] == one[key] for key in fresh) for one in chosen)
            if len(chosen) < n and not taken:
                chosen.append(row)
    return chosen
