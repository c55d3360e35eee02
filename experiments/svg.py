"""Charts as inline SVG: plain functions from numbers to markup. Colours are classes, which the page's style defines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 380
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 12, 36
LABEL = 148  # room for an arm's name in the charts with one line an arm


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Series:
    name: str
    colour: int
    points: list[Point] = field(default_factory=list)
    hollow: bool = False
    line: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis with labelled ticks. Outer limits are those of `low` and `high`; `log` spaces by ratios."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        f: Callable[[float], float] = math.log if self.log else float
        value = min(max(value, self.low), self.high)
        return start + (end - start) * (f(value) - f(self.low)) / (f(self.high) - f(self.low))


def even_axis(label: str, low: float, high: float, form: str = "g") -> Axis:
    """A linear axis from about low to about high with 4 to 6 round ticks."""
    span = max(high - low, 1e-9)
    raw = span / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        last += 1
    ticks = [(i * step, format(round(i * step, 10), form)) for i in range(first, last + 1)]
    return Axis(label, first * step, last * step, ticks)


def colour(index: int, hollow: bool = False) -> str:
    """The class of a mark; the seven colours come round again."""
    return f"s{index % 7}{' hollow' if hollow else ''}"


def _svg(height: float, title: str, body: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _dot(x: float, y: float, title: str) -> str:
    """A dot that tells its figure when pointed at; without a title, a small one."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if title else 1.6}"><title>{escape(title)}</title></circle>'


def scatter(title: str, series: Sequence[Series], x: Axis, y: Axis, levels: Sequence[tuple[float, str]] = ()) -> str:
    """Points with whiskers, joined within a series; `levels` are dashed horizontal lines with a name."""
    height, right, bottom = 250, WIDTH - RIGHT, 250 - BOTTOM
    body = []
    for value, label in y.ticks:
        at = y.place(value, bottom, TOP)
        body += [_line(LEFT, at, right, at, "grid"), _text(LEFT - 5, at + 4, label, "", "end")]
    for value, label in x.ticks:
        at = x.place(value, LEFT + 14, right - 14)
        body += [_line(at, bottom, at, bottom + 4, "axis"), _text(at, bottom + 16, label, "", "middle")]
    body += [
        _line(LEFT, bottom, right, bottom, "axis"),
        _text((LEFT + right) / 2, height - 4, x.label, "label", "middle"),
    ]
    taken: list[float] = []
    for value, label in levels:
        at = y.place(value, bottom, TOP)
        above = at - 4 > TOP + 6 and all(abs(at - 4 - other) > 11 for other in taken)
        taken.append(at - 4 if above else at + 12)
        body += [_line(LEFT, at, right, at, "level"), _text(right, taken[-1], label, "label", "end")]
    for index, one in enumerate(series):
        shift = 3.5 * (index - (len(series) - 1) / 2) if one.line and one.points[0].title else 0
        spots = [(x.place(p.x, LEFT + 14, right - 14) + shift, y.place(p.y, bottom, TOP), p) for p in one.points]
        marks = []
        if one.line and len(spots) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in spots)
            marks.append(f'<polyline points="{path}"/>')
        for a, b, p in spots:
            if p.high > p.low:
                marks.append(_line(a, y.place(p.low, bottom, TOP), a, y.place(p.high, bottom, TOP), "whisker"))
            marks.append(_dot(a, b, p.title))
        body.append(f'<g class="{colour(one.colour, one.hollow)}">{"".join(marks)}</g>')
    return _svg(height, title, body)


@dataclass(frozen=True)
class Bar:
    """One line of a chart with a name at its left; value, low and high for `intervals`, parts for `stacked`."""

    label: str
    colour: int = 0
    value: float = 0.0
    low: float = 0.0
    high: float = 0.0
    text: str = ""
    parts: Sequence[tuple[str, float]] = ()


def intervals(title: str, bars: Sequence[Bar], x: Axis, band: float = 0.0, levels: Sequence[float] = ()) -> str:
    """One dot with its interval a line; `band` shades -band to band, `levels` are dashed vertical lines."""
    step, right = 20, WIDTH - RIGHT
    bottom = TOP + step * len(bars)
    body = []
    if band:
        start, end = x.place(-band, LABEL, right), x.place(band, LABEL, right)
        body.append(f'<rect x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" height="{bottom - TOP}" class="band"/>')
    for value, label in x.ticks:
        at = x.place(value, LABEL, right)
        body += [_line(at, TOP, at, bottom, "axis" if band and value == 0 else "grid")]
        body.append(_text(at, bottom + 14, label, "", "middle"))
    body += [_line(at, TOP, at, bottom, "level") for at in (x.place(value, LABEL, right) for value in levels)]
    body.append(_text((LABEL + right) / 2, bottom + 30, x.label, "label", "middle"))
    for index, bar in enumerate(bars):
        at = TOP + step * (index + 0.5)
        ends = x.place(bar.low, LABEL, right), x.place(bar.high, LABEL, right)
        body.append(_text(LABEL - 8, at + 4, bar.label, "arm", "end"))
        body.append(
            f'<g class="{colour(bar.colour)}">{_line(ends[0], at, ends[1], at, "whisker")}'
            f"{_dot(x.place(bar.value, LABEL, right), at, bar.text)}</g>"
        )
    return _svg(bottom + BOTTOM, title, body)


def stacked(title: str, bars: Sequence[Bar]) -> str:
    """One bar of shares a line; the parts of a bar add up to 1, each of the colour class o-NAME."""
    step, right = 20, WIDTH - RIGHT
    bottom = TOP + step * len(bars)
    body = []
    for index, bar in enumerate(bars):
        top, at = TOP + step * index + 2, float(LABEL)
        body.append(_text(LABEL - 8, top + 12, bar.label, "arm", "end"))
        for name, part in bar.parts:
            width = part * (right - LABEL)
            if width > 0:
                text = escape(f"{bar.label}: {name.replace('_', ' ')} {100 * part:.1f} %")
                body.append(
                    f'<rect x="{at:.1f}" y="{top}" width="{width:.1f}" height="{step - 4}" class="o-{name}">'
                    f"<title>{text}</title></rect>"
                )
            at += width
    for value in (0, 25, 50, 75, 100):
        body.append(_text(LABEL + value / 100 * (right - LABEL), bottom + 14, f"{value}", "", "middle"))
    body.append(_text((LABEL + right) / 2, bottom + 30, "% of the questions", "label", "middle"))
    return _svg(bottom + BOTTOM, title, body)
