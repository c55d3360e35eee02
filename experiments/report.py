"""Tables in the terminal, report.html, and a RESULT.md an experiment: all of it from the rows of a folder."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from experiments import evidence, tables
from experiments.decide import counts, gap
from experiments.evidence import Evidence
from experiments.figures import fabrications
from experiments.hypotheses import FALSIFIED, NOT_COUNTED, OPEN, SUPPORTED, is_negative, judge, shown
from experiments.page import page
from experiments.tables import Table

SECTIONS = (
    (SUPPORTED, "Where this model agrees with the published findings"),
    (FALSIFIED, "Where it does not"),
    (OPEN, "Undecided"),
    (NOT_COUNTED, "Not counted, since the control failed"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments report", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="the folder that a run wrote")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="also keep a finished run's rows, manifest and RESULT.md in experiments/EXPERIMENT/results/MODEL",
    )
    args = parser.parse_args(argv)
    page_file = report(args.folder)
    if args.publish:
        from experiments.publish import publish

        print("", *(f"Published: {target}" for target in publish(args.folder)), sep="\n")
    print(f"\nThe whole report: {page_file}")
    return 0


def report(folder: str | Path) -> Path:
    """Print the tables, write report.html and eN_RESULT.md into the folder, and give the path of the page."""
    folder = Path(folder)
    found = evidence.read(folder)
    for one in found:
        (folder / f"{one.protocol.name}_RESULT.md").write_text(result(one), encoding="utf-8", errors="backslashreplace")
        print(terminal(one))
    path = folder / "report.html"
    path.write_text(page(found), encoding="utf-8")
    return path


def terminal(one: Evidence) -> str:
    lines = [f"\n{one.protocol.name.upper()}: {one.protocol.title}, {one.model}", control(one)]
    if one.changes:
        lines.append(f"Not the protocol: {'; '.join(one.changes)}.")
    if one.missing:
        lines += ["", "Incomplete. Missing:", *(f"  {line}" for line in one.missing)]
    wanted = [
        tables.arms_table(one),
        tables.outcomes_table(one),
        *tables.pairs_tables(one),
        tables.hypotheses_table(one),
    ]
    return "\n".join(lines + [_aligned(table) for table in wanted if table.rows])


def control(one: Evidence) -> str:
    """Whether the model counts: recall of full against none, as the decision rule asks."""
    found, needed = gap(one), 100 * one.protocol.decision.min_gap
    if found is None:
        return "Control: full or none has no answers, so no verdict counts."
    says = "The model counts." if counts(one) else "On this model the experiment says nothing."
    return f"Control: recall of full minus none {shown(found)}; {needed:g} points are needed. {says}"


def _aligned(table: Table) -> str:
    grid = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return "\n".join(["", table.title, lines[0], "-" * len(lines[0]), *lines[1:]])


def result(one: Evidence) -> str:
    """RESULT.md of an experiment: what the decision rule says, then the tables, then fabrications word for word."""
    findings = judge(one)
    parts = [
        f"# {one.protocol.name.upper()}: {one.protocol.title} ({one.model})",
        f"Written from the rows by `python -m experiments report`; not edited by hand. {_origin(one)}",
        "## What the decision rule says",
        control(one),
    ]
    if one.changes:
        parts.append(f"**Not the protocol:** {'; '.join(one.changes)}.")
    if one.missing:
        parts.append("**This run is incomplete.** Missing:\n\n" + _items(one.missing))
    negative = (f"{f.claim} ({f.status}: `{f.subject}`)" for f in findings if is_negative(one.protocol.name, f))
    parts += _section("Negative results", list(negative))
    for status, title in SECTIONS:
        lines = (f"{f.number}. {f.claim}: `{f.subject}` {f.evidence}" for f in findings if f.status == status)
        parts += _section(title, list(lines))
    remarks = [f"{tables.source()}: {text}" for text in tables.remarks(one.protocol.name)]
    parts += [
        "## Tables",
        *(markdown(table) for table in tables.all_tables(one)),
        *([_items(remarks)] if remarks else []),
    ]
    parts += ["## Fabrications, word for word", _fabrications(one)]
    return "\n\n".join(parts) + "\n"


def _origin(one: Evidence) -> str:
    manifest = one.manifest
    if not manifest:
        return "No manifest beside the rows."
    tree = ", working tree with uncommitted changes" if manifest.get("dirty") else ""
    commit, machine = manifest.get("commit", "unknown"), manifest.get("machine", "machine unknown")
    later = dict.fromkeys(start["commit"] for start in manifest.get("resumed", []) if start.get("commit"))
    resumed = f", resumed at {', '.join(later)}" if later else ""
    return f"Commit {commit}{tree}{resumed}; protocol {one.protocol.sha256[:12]}; {machine}."


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"### {title}", _items(lines)] if lines else []


def _items(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown(table: Table) -> str:
    return f"### {table.title}\n\n{untitled(table)}"


def untitled(table: Table) -> str:
    rows = [table.columns, ("---",) * len(table.columns), *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return body + (f"\n\n{table.note}" if table.note else "")


def _fabrications(one: Evidence) -> str:
    """Answers as JSON strings in an indented block, which no answer can break out of."""
    rows = fabrications(one)
    if not rows:
        return "No answer of this run is a fabrication."
    return "\n\n".join(
        f"`{row['arm']}`, text {row['text']}, question {row['item'] + 1}, gold {row['gold']}:\n\n"
        f"    {json.dumps(row['answer'], ensure_ascii=False)}"
        for row in rows
    )
