"""The report as one HTML file: style, charts and script are inside, nothing is fetched, every text is escaped."""

import re
from html import escape
from pathlib import Path

from experiments import speed, tables
from experiments.charts import Chart, charts
from experiments.decide import counts, gap
from experiments.evidence import Evidence
from experiments.hypotheses import is_negative, judge, shown
from experiments.tables import OUTCOMES, PUBLISHED, Table

HOME = Path(__file__).parent
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def safe(text: object) -> str:
    """Text for HTML, content or attribute. Characters that no page can hold are spelled out, so nothing is lost."""
    return escape(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text)))


def page(found: list[Evidence]) -> str:
    style, script = ((HOME / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<a href="#{e.protocol.name}">{safe(e.protocol.name.upper())}</a>' for e in found)
    links += '<a href="#speed">Speed</a>' if speed.results() else ""
    title = f"KV memory experiments, {found[0].model}"
    body = "".join(_experiment(evidence) for evidence in found) + _speed()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{style}</style></head><body><header><h1>{safe(title)}</h1>"
        f"<nav>{links}</nav>{_run(found[0])}</header><main>{body}</main>{_source()}<script>{script}</script></body></html>\n"
    )


def _run(evidence: Evidence) -> str:
    """How and where the rows were made, from the manifest."""
    if not evidence.manifest:
        return '<p class="warn">No manifest.json beside the rows: machine, versions and commit are unknown.</p>'
    items = []
    for key, value in (evidence.manifest | {"model": evidence.model}).items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        items.append(f"<dt>{safe(key)}</dt><dd>{safe(value)}</dd>")
    dirty = (
        '<p class="warn">Run from a working tree with uncommitted changes.</p>'
        if evidence.manifest.get("dirty")
        else ""
    )
    return f"{dirty}<details><summary>How these rows were made</summary><dl>{''.join(items)}</dl></details>"


def _experiment(evidence: Evidence) -> str:
    name = evidence.protocol.name
    figures = [_chart(chart) for chart in charts(evidence)]
    drawn = f'<div class="pair">{"".join(figures[:2])}</div><div class="more">{"".join(figures[2:])}</div>'
    shown_tables = tables.all_tables(evidence)
    remarks = "".join(f"<li>{safe(text)}</li>" for text in tables.remarks(name))
    remarks = (
        f"<details><summary>{safe(tables.source())}, on several arms at once</summary><ul>{remarks}</ul></details>"
    )
    return (
        f'<section id="{safe(name)}"><h2>{safe(name.upper())}: {safe(evidence.protocol.title)}</h2>'
        f"{_missing(evidence)}{_control(evidence)}{_findings(evidence)}"
        f"{drawn}{''.join(map(_table, shown_tables))}{remarks}{_answers(evidence)}</section>"
    )


def _speed() -> str:
    """What the bench measured, the same whichever model the rows are of; nothing if no run of it is kept."""
    found = speed.results()
    every = (speed.targets_table(found), speed.profile_table(found), speed.selection_table(found))
    shown_tables = [table for table in every if table.rows]
    drawn = [
        speed.selection_chart(found, batch) for batch in sorted({row["batch"] for row in found.get("selection", [])})
    ]
    if not found:
        return ""
    about = "".join(f"<li>{safe(line)}</li>" for line in speed.machines())
    return (
        f'<section id="speed"><h2>Speed, measured</h2><ul>{about}</ul>'
        f'<div class="pair">{"".join(_chart(chart) for chart in drawn if chart)}</div>'
        f"{''.join(map(_table, shown_tables))}</section>"
    )


def _missing(evidence: Evidence) -> str:
    """What this run changed of the protocol and what it lacks of it, if anything."""
    changed = "; ".join(evidence.changes)
    changed = f'<p class="warn">Not the protocol: {safe(changed)}.</p>' if changed else ""
    if not evidence.missing:
        return changed
    lines = "".join(f"<li>{safe(line)}</li>" for line in evidence.missing)
    words = "This run is incomplete; what there is, is shown."
    return f'{changed}<details class="warn"><summary>{words}</summary><ul>{lines}</ul></details>'


def _control(evidence: Evidence) -> str:
    control, needed = gap(evidence), 100 * evidence.protocol.decision.min_gap
    if control is None:
        return '<p class="warn">Without full and none there is no control, and no verdict counts.</p>'
    words = f"recall of full minus none {shown(control)}; {needed:g} points are needed."
    if counts(evidence):
        return f"<p>Control: {safe(words)} The model counts.</p>"
    return f'<p class="warn">Control failed: {safe(words)} On this model the experiment says nothing.</p>'


def _findings(evidence: Evidence) -> str:
    """The hypotheses, each with a line for every pair that speaks to it."""
    groups: dict[str, list[str]] = {}
    for one in judge(evidence):
        bad = '<span class="chip negative">negative result</span>' if is_negative(evidence.protocol.name, one) else ""
        chips = f'<span class="chip {one.status.replace(" ", "_")}">{one.status}</span>{bad}'
        line = f"<li>{chips}<b>{safe(one.subject)}</b> {safe(one.evidence)}</li>"
        groups.setdefault(f"{one.number}. {one.claim}", []).append(line)
    body = "".join(f"<h4>{safe(claim)}</h4><ul>{''.join(lines)}</ul>" for claim, lines in groups.items())
    note = (
        "The hypotheses are findings of the published report: supported agrees with it, falsified does not, and open "
        "means that these rows decide neither way."
    )
    return f'<div class="findings"><p>{note}</p>{body}</div>' if body else ""


def _chart(chart: Chart) -> str:
    legend = "".join(f'<span><i class="{kind}"></i>{safe(name)}</span>' for kind, name in chart.legend)
    return f'<figure><figcaption>{safe(chart.title)}</figcaption>{chart.svg}<div class="legend">{legend}</div></figure>'


def _table(table: Table) -> str:
    """A table that scrolls sideways on its own; published figures keep a class of their own."""
    kinds = ["published" if column.startswith("published") else "" for column in table.columns]
    head = "".join(f'<th class="{kind}">{safe(column)}</th>' for column, kind in zip(table.columns, kinds, strict=True))
    rows = (
        "".join(f'<td class="{kind}">{safe(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        for row in table.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = f"<p>{safe(table.note)}</p>" if table.note else ""
    return (
        f"<details open><summary>{safe(table.title)}</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</details>'
    )


def _answers(evidence: Evidence) -> str:
    """Every question with every arm's answer, with fields to filter by; the script hides what does not match."""
    by_question: dict[tuple[int, int], list[str]] = {}
    head: dict[tuple[int, int], str] = {}
    for arm in evidence.arms:
        for row in evidence.of("question", arm):
            key = (row["text"], row["item"])
            question = f" {row['value']}" if isinstance(row["value"], str) else ""
            head.setdefault(key, f"text {row['text']}, question {row['item'] + 1}:{question} gold {row['gold']}")
            by_question.setdefault(key, []).append(
                f'<li class="o-{safe(row["outcome"])}" data-arm="{safe(arm)}"><b>{safe(arm)}</b>'
                f"<code>{safe(row['answer'])}</code><em>{safe(row['outcome'].replace('_', ' '))}</em></li>"
            )
    cards = "".join(
        f'<article data-text="{key[0]}"><h4>{safe(head[key])}</h4><ul>{"".join(by_question[key])}</ul></article>'
        for key in sorted(by_question)
    )
    fields = (
        _choice("text", "all texts", [str(text) for text in evidence.texts])
        + _choice("arm", "all arms", evidence.arms)
        + _choice("outcome", "all outcomes", OUTCOMES)
        + '<input type="search" placeholder="search" aria-label="search in questions and answers"><output></output>'
    )
    return (
        f'<details class="answers"><summary>Every question with every answer ({len(by_question)} questions)</summary>'
        f"<form>{fields}</form>{cards}</details>"
    )


def _choice(name: str, every: str, options: list[str] | tuple[str, ...]) -> str:
    entries = "".join(f'<option value="{safe(o)}">{safe(o.replace("_", " "))}</option>' for o in options)
    return f'<select name="{name}" aria-label="{name}"><option value="">{every}</option>{entries}</select>'


def _source() -> str:
    entry = PUBLISHED["source"]
    words = f'Published figures: {entry["author"]}, "{entry["title"]}", {entry["date"]}, on {entry["model"]}.'
    ours = "They were made by other code on another model; all other figures come from the rows."
    return f"<footer><p>{safe(words)} {ours}</p></footer>"
