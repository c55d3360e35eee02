"""The charts of each experiment, drawn from its rows; a chart without rows is left out."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from experiments.decide import decide
from experiments.evidence import Evidence
from experiments.figures import layers, lse_error, mean, share, stored_share
from experiments.hypotheses import shown
from experiments.stats import Interval, mean_interval
from experiments.svg import Axis, Bar, Point, Series, colour, even_axis, intervals, scatter, stacked
from experiments.tables import OUTCOMES

RECALL = even_axis("recall, %", 0, 100)
READS = Axis(
    "read per query, % of the text's keys and values",
    0.01,
    1.0,
    [(share, f"{100 * share:g}") for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)],
    log=True,
)


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()  # (class of the mark, name)


def charts(evidence: Evidence) -> list[Chart]:
    own = {"e0": _by_size, "e1": _by_arm}.get(evidence.protocol.name, _by_reads)
    found = [own(evidence, "recall"), own(evidence, "copy_nll"), _outcomes(evidence), *_differences(evidence)]
    found += [_layers(evidence, "top8_share"), _layers(evidence, "mass_share"), _mass(evidence)]
    return [chart for chart in found if chart]


def _measured(evidence: Evidence, arm: str, measure: str) -> Interval | None:
    """Recall in percent, or an NLL in nats, with its interval."""
    if measure == "copy_nll":
        values = list(evidence.nll(arm, measure).values())
        return mean_interval(values) if values else None
    found = share(evidence, arm, measure)
    return Interval(*(100 * x for x in (found.value, found.low, found.high))) if found else None


def _nll_axis(evidence: Evidence) -> Axis:
    values = [value for arm in evidence.arms for value in evidence.nll(arm, "copy_nll").values()]
    return even_axis("copy NLL, nats a token", 0, max(values, default=1.0))


def _point(evidence: Evidence, arm: str, measure: str, x: float | None) -> list[Point]:
    found = _measured(evidence, arm, measure)
    if found is None or x is None:
        return []
    low, high = (found.low, found.high) if measure == "recall" else (found.value, found.value)
    return [Point(x, found.value, low, high, f"{arm}: {found.value:.{1 if measure == 'recall' else 3}f}")]


def _plot(evidence: Evidence, measure: str, title: str, x: Axis, series: list[Series]) -> Chart | None:
    series = [one for one in series if one.points]
    if not series:
        return None
    levels = [(found.value, arm) for arm in ("full", "none") if (found := _measured(evidence, arm, measure))]
    y = RECALL if measure == "recall" else _nll_axis(evidence)
    legend = tuple((colour(one.colour, one.hollow), one.name) for one in series)
    return Chart(f"{title}, {y.label}", scatter(f"{y.label} against {x.label}", series, x, y, levels), legend)


def _by_size(evidence: Evidence, measure: str) -> Chart | None:
    kinds = list(dict.fromkeys(arm.partition("/")[0] for arm in evidence.arms if "/" in arm))
    series = [
        Series(
            kind,
            index,
            sorted(
                (
                    point
                    for arm in evidence.arms
                    if arm.partition("/")[0] == kind
                    for point in _point(evidence, arm, measure, stored_share(evidence, arm))
                ),
                key=lambda point: point.x,
            ),
        )
        for index, kind in enumerate(kinds)
    ]
    stored = [point.x for one in series for point in one.points]
    if not stored or not min(stored):
        return None
    low, high = min(stored) / 1.25, 1.25 * max(stored)
    ticks = [(1 / f, f"1/{f}") for f in (256, 128, 64, 32, 16, 8, 4, 2, 1) if low <= 1 / f <= high]
    sizes = Axis("stored, share of the whole cache", low, high, ticks, log=True)
    return _plot(evidence, measure, "Memory alone", sizes, series)


def _by_reads(evidence: Evidence, measure: str) -> Chart | None:
    selectors = list(dict.fromkeys(arm.partition("+")[0] for arm in evidence.arms if ":" in arm))
    series = []
    for index, selector in enumerate(selectors):
        for arm in (arm for arm in evidence.arms if arm.partition("+")[0] == selector):
            points = _point(evidence, arm, measure, mean(evidence.values("memory", arm, "reads_share")))
            series.append(Series(arm, index, points, hollow="+" not in arm, line=False))
    return _plot(evidence, measure, "Selected records", READS, series)


def _by_arm(evidence: Evidence, measure: str) -> Chart | None:
    selectors = list(dict.fromkeys(arm.partition("+")[0] for arm in evidence.arms))
    bars = []
    for arm in evidence.arms:
        if found := _measured(evidence, arm, measure):
            low, high = (found.low, found.high) if measure == "recall" else (found.value, found.value)
            text = f"{arm}: {found.value:.{1 if measure == 'recall' else 3}f}"
            bars.append(Bar(arm, selectors.index(arm.partition("+")[0]), found.value, low, high, text))
    if not bars:
        return None
    x = RECALL if measure == "recall" else _nll_axis(evidence)
    levels = [found.value for arm in ("full", "none") if (found := _measured(evidence, arm, measure))]
    return Chart(f"Function against none, {x.label}", intervals(f"{x.label} of each arm", bars, x, levels=levels))


def _outcomes(evidence: Evidence) -> Chart | None:
    bars = []
    for arm in evidence.arms:
        found = [row["outcome"] for row in evidence.of("question", arm)]
        if found:
            bars.append(Bar(arm, parts=tuple((name, found.count(name) / len(found)) for name in OUTCOMES)))
    legend = tuple((f"o-{name}", name.replace("_", " ")) for name in OUTCOMES)
    return Chart("What became of the questions", stacked("outcomes of each arm", bars), legend) if bars else None


def _differences(evidence: Evidence) -> list[Chart]:
    """The declared differences with intervals, a chart a family; the band is the equivalence bound."""
    found = []
    for family in evidence.protocol.families:
        pairs = decide(evidence, family)
        if not pairs:
            continue
        nll = pairs[0].is_nll
        scale, unit = (1, "nats") if nll else (100, "points")
        bounded = all(math.isfinite(one.difference.low) for one in pairs)
        bars = [
            Bar(
                one.a,
                index,
                scale * one.difference.value,
                scale * (one.difference.low if bounded else one.difference.value),
                scale * (one.difference.high if bounded else one.difference.value),
                f"{one.a} - {one.b}: {shown(one)}",
            )
            for index, one in enumerate(pairs)
        ]
        ends = [end for bar in bars for end in (bar.low, bar.high)]
        against = (
            " / ".join(dict.fromkeys(one.b for one in pairs)) if len({one.b for one in pairs}) == 1 else "its control"
        )
        x = even_axis(f"{family.measure.replace('_', ' ')}, {unit}, minus {against}", min(0.0, *ends), max(0.0, *ends))
        band = 0.0 if nll else 100 * evidence.protocol.decision.margin
        title = family.name[0].upper() + family.name[1:]
        found.append(Chart(f"{title}: difference", intervals(title, bars, x, band, levels=[0.0])))
    return found


def _per_layer(
    evidence: Evidence, arms: list[str], title: str, label: str, scale: float, of: Callable[[str], dict[int, float]]
) -> Chart | None:
    """A line an arm; arms that share a line, as those with the same index do, share it by name too."""
    lines: dict[str, dict[int, float]] = {}
    for arm in arms:
        values = of(arm)
        twin = next((name for name in lines if lines[name] == values), None)
        if twin:
            lines[f"{twin}, {arm}"] = lines.pop(twin)
        elif values:
            lines[arm] = values
    if not lines:
        return None
    series = [
        Series(name, index, [Point(layer, scale * y, 0, 0, "") for layer, y in values.items()])
        for index, (name, values) in enumerate(lines.items())
    ]
    ys = [point.y for one in series for point in one.points]
    last = max(layer for values in lines.values() for layer in values)
    x = Axis("layer", 0, max(last, 1), [(layer, str(layer)) for layer in range(0, last + 1, 4 if last > 11 else 1)])
    y = even_axis(label, 0, 100) if scale == 100 else even_axis(label, min(0.0, *ys), max(0.0, *ys))
    legend = tuple((colour(one.colour), one.name) for one in series)
    return Chart(title, scatter(f"{title}, per layer", series, x, y), legend)


def _layers(evidence: Evidence, key: str) -> Chart | None:
    title = "True top 8 found, % per layer" if key == "top8_share" else "True attention mass found, % per layer"
    arms = [arm for arm in evidence.arms if "+" not in arm]
    return _per_layer(evidence, arms, title, "%", 100, lambda arm: layers(evidence, arm, key))


def _mass(evidence: Evidence) -> Chart | None:
    """Of each kind of memory one size, the middle one of those that were measured: more lines cannot be told apart."""
    sized = [arm for arm in evidence.arms if "/" in arm and "+" not in arm]
    sizes = sorted({int(arm.partition("/")[2]) for arm in sized})
    arms = [arm for arm in sized if arm.endswith(f"/{sizes[len(sizes) // 2]}")]
    title = "Error of the log mass, nats per layer"
    return _per_layer(evidence, arms, title, "nats", 1, lambda arm: lse_error(evidence, arm))
