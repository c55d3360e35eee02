"""What tools/bench.py measured and this project keeps: targets met or missed, and selection against the length of a text.

Each file of speed/ is one run of the bench, with machine and versions. All figures are ratios of contenders that took
turns in one run; a later run of a work replaces an earlier one.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.charts import Chart
from experiments.protocol import HOME
from experiments.svg import Axis, Point, Series, colour, scatter
from experiments.tables import NOTHING, Table

SPEED = HOME / "speed"
Results = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Target:
    """A bound on a figure of the bench: the row `what` (and `where`) of a work, its `key`; inverse: one over the figure."""

    words: str
    work: str
    what: str
    bound: float
    key: str = "ratio to npqwen"
    inverse: bool = False
    most: bool = False  # the bound is an upper one
    where: tuple[tuple[str, Any], ...] = ()
    by_memory: bool = False  # no faster than the weights can be read, so measured / share of the bandwidth is the most


OF_BANDWIDTH = Target(
    "decode, one row: share of the read bandwidth", "decode", "npqwen", 0.85, "share of read bandwidth"
)
TARGETS = (
    Target(
        "decode, one row: times faster than transformers float32", "decode", "transformers float32", 7, by_memory=True
    ),
    Target(
        "decode, one row: times faster than transformers bfloat16", "decode", "transformers bfloat16", 4, by_memory=True
    ),
    Target("decode, one row: times faster than llama.cpp BF16", "decode", "llama.cpp BF16", 1.6, by_memory=True),
    Target("decode, one row: times faster than llama.cpp Q4_K_M", "decode", "llama.cpp Q4_K_M", 1, by_memory=True),
    OF_BANDWIDTH,
    Target("decode, 20 rows: times faster than transformers float32", "batch", "transformers float32", 2.5),
    Target("prefill of 2,000: times faster than transformers float32", "prefill", "transformers float32", 1.5),
    Target("prefill of 2,000: times faster than llama.cpp BF16", "prefill", "llama.cpp BF16", 1.1),
    Target("prefill of 2,000: share of NumPy's sgemm rate", "prefill", "npqwen", 0.8, "share of sgemm"),
    Target(
        "peak memory over that of transformers float32", "memory", "transformers float32", 0.55, inverse=True, most=True
    ),
    Target(
        "start to first token over transformers float32", "open", "transformers float32", 0.2, inverse=True, most=True
    ),
    Target("20 questions of a text: times faster than kvpress, one by one", "ask", "kvpress float32", 8),
    Target("20 questions: times faster than transformers with a cached text", "ask", "transformers float32", 8),
    Target("20 questions through the slowest arm, over those through full", "ask", "slowest arm", 1.3, most=True),
    Target("k-means and fit of a text over reading it", "ask", "fit of ffit/8", 0.5, "ratio to reading", most=True),
    Target(
        "dense attention to 32,768 keys: share of the read bandwidth",
        *("attention", "npqwen", 0.8, "share of read bandwidth"),
        where=(("S", 32768),),
    ),
    Target(
        "attention to 32,768 keys through lowrank16:64:8: times faster than dense",
        *("selection", "lowrank16:64:8", 6, "times faster than dense"),
        where=(("keys", 32768), ("batch", 1)),
    ),
    Target(
        "whole-model decode at 32,768 keys through lowrank16:64:8: times faster than dense",
        *("long", "lowrank16:64:8", 2, "times faster than dense"),
        where=(("keys", 32768),),
    ),
)


def results(folder: Path = SPEED) -> Results:
    """The rows of every work that was kept, the machine's line left out."""
    return {work: _read(file)[work] for work, file in _latest(folder).items()}


def machines(folder: Path = SPEED) -> list[str]:
    """Of each file, in words: what was measured, on which machine, with which versions."""
    latest, lines = _latest(folder), []
    for file in dict.fromkeys(latest.values()):
        works, machine = ", ".join(work for work in latest if latest[work] == file), _read(file)["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        day = machine["date"][:10]
        lines.append(f"{works}: {machine['model']}; {machine['cpu']}, {machine['threads']} threads, {day}; {versions}")
    return lines


def _latest(folder: Path) -> dict[str, Path]:
    """The file that each work was measured for last."""
    files = sorted(folder.glob("*.json"), key=lambda path: _read(path)["machine"]["date"])
    return {work: file for file in files for work in _read(file) if work != "machine"}


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def targets_table(found: Results) -> Table:
    rows = []
    for target in TARGETS:
        value, limit = _figure(found, target), NOTHING
        if value is None:
            measured, met = "not measured", NOTHING
        else:
            measured = f"{value:.2f}"
            met = "met" if (value <= target.bound if target.most else value >= target.bound) else "missed"
            if target.by_memory and (share := _figure(found, OF_BANDWIDTH)):
                limit = f"{value / share:.2f}"
        rows.append((target.words, f"{'≤' if target.most else '≥'} {target.bound:g}", measured, limit, met))
    note = (
        "Limit: what the machine allows, were the bf16 weights read at its full bandwidth in the same run. "
        "The targets were set on another machine."
    )
    return Table("Speed against peers", ("work", "target", "measured", "limit", ""), tuple(rows), note)


def _figure(found: Results, target: Target) -> float | None:
    wanted = {"what": target.what} | dict(target.where)
    row = next((r for r in found.get(target.work, []) if wanted.items() <= r.items()), {})
    value = row.get(target.key)
    return 1 / value if target.inverse and value is not None else value


def profile_table(found: Results) -> Table:
    """Where our own time goes: what a missed target is up against."""
    rows = tuple(
        (row["what"], *(f"{row[f'% of {phase}']:.1f}" for phase in ("prefill", "decode")))
        for row in found.get("profile", [])
    )
    return Table("Stages, % of the time", ("stage", "prefill of 2,000", "decode, one row"), rows)


def selection_table(found: Results) -> Table:
    """One attention step of all layers of Qwen3-1.7B: time, bytes, and what the arithmetic would allow."""
    columns = (
        "arm",
        "rows",
        "keys",
        "ms",
        "dense ms",
        "torch ms",
        "times faster than dense",
        "limit by reads",
        "MB",
        "pays from",
    )
    rows = tuple(
        (
            row["what"],
            str(row["batch"]),
            f"{row['keys']:,}",
            f"{row['ms a step']:.1f}",
            f"{row['dense ms']:.1f}",
            f"{row['torch ms']:.1f}" if "torch ms" in row else NOTHING,
            f"{row['times faster than dense']:.2f}",
            f"{row['limit by reads']:.1f}",
            f"{row['MB']:.1f}",
            str(row["pays from"]),
        )
        for row in found.get("selection", [])
    )
    note = (
        "Medians, turns in rotated order. MB: what a step touches. Limit by reads: one over the share of floats read, by "
        "arithmetic. Pays from: the number of keys from which on the arm stays faster than our dense attention."
    )
    return Table("One attention step of all layers, measured", columns, rows, note)


def selection_chart(found: Results, batch: int = 1) -> Chart | None:
    """Time of a step against the number of keys, both by ratios; dense attention, torch, and arms without a function."""
    rows = [row for row in found.get("selection", []) if row["batch"] == batch and "+" not in row["what"]]
    if not rows:
        return None
    lines: dict[str, dict[int, float]] = {"dense": {}, "torch sdpa": {}}
    for row in rows:
        lines["dense"][row["keys"]] = row["dense ms"]
        if "torch ms" in row:
            lines["torch sdpa"][row["keys"]] = row["torch ms"]
        lines.setdefault(row["what"], {})[row["keys"]] = row["ms a step"]
    series = [
        Series(
            name, index, [Point(keys, ms, ms, ms, f"{name}, {keys:,} keys: {ms:.1f} ms") for keys, ms in line.items()]
        )
        for index, (name, line) in enumerate((name, line) for name, line in lines.items() if line)
    ]
    keys = sorted({row["keys"] for row in rows})
    every = [point.y for one in series for point in one.points]
    low, high = 10 ** math.floor(math.log10(min(every))), 10 ** math.ceil(math.log10(max(every)))
    decades = range(round(math.log10(low)), round(math.log10(high)) + 1)
    x = Axis("keys", keys[0], keys[-1], [(n, f"{n // 1024}k" if n >= 1024 else str(n)) for n in keys], log=True)
    y = Axis("ms", low, high, [(10.0**e, f"{10.0**e:g}") for e in decades], log=True)
    title = f"One attention step of all layers, {batch} row{'s' if batch > 1 else ''}, ms"
    return Chart(title, scatter(title, series, x, y), tuple((colour(one.colour), one.name) for one in series))
