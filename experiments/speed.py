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
    """The rows of every work, of the last run that was kept; of `selection`, whose runs differ in their keys, of all."""
    found = {work: rows for file in _files(folder) for work, rows in _read(file).items() if work != "machine"}
    selection = {
        (row["batch"], row["what"], row["keys"]): row
        for file in _files(folder)
        for row in _read(file).get("selection", [])
    }
    if selection:
        found["selection"] = pays_from([selection[key] for key in sorted(selection)])
    return found


def machines(folder: Path = SPEED) -> list[str]:
    """Of each file, in words: what was measured, on which machine, with which versions."""
    last = {work: file for file in _files(folder) for work in _read(file)}
    lines = []
    for file in _files(folder):
        kept = _read(file)
        machine = kept.pop("machine")
        works = ", ".join(work for work in kept if last[work] == file or work == "selection")
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        where = f"{machine['cpu']}, {machine['threads']} threads, {machine['date'][:10]}"
        if works:
            lines.append(f"{works}: {machine['model']}; {where}; {versions}")
    return lines


def pays_from(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `selection` with the number of keys from which on their arm stays faster than dense attention."""
    out = []
    for row in rows:
        alike = [other for other in rows if (other["what"], other["batch"]) == (row["what"], row["batch"])]
        points = sorted((other["keys"], other["times faster than dense"]) for other in alike)
        out.append(row | {"pays from": break_even(points)})
    return out


def break_even(points: list[tuple[int, float]]) -> str:
    """The number of keys from which on an arm stays faster, interpolated in logarithms between (keys, times faster)."""
    slower = [i for i, (_, times) in enumerate(points) if times < 1]
    if not slower:
        return f"below {points[0][0]}"
    if slower[-1] == len(points) - 1:
        return f"beyond {points[-1][0]}"
    (keys0, times0), (keys1, times1) = points[slower[-1]], points[slower[-1] + 1]
    share = math.log(1 / times0) / math.log(times1 / times0)
    return f"{keys0 * (keys1 / keys0) ** share:.0f}"


def _files(folder: Path) -> list[Path]:
    """The kept runs, in the order of their dates."""
    return sorted(folder.glob("*.json"), key=lambda path: _read(path)["machine"]["date"])


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
