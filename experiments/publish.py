"""Results that stay: a finished run's rows, manifest and RESULT.md beside its protocol, and all models side by side."""

import shutil
from collections.abc import Callable
from pathlib import Path

from experiments import evidence, speed, tables
from experiments.evidence import Evidence
from experiments.figures import mean, seconds, share
from experiments.hypotheses import judge
from experiments.protocol import HOME
from experiments.report import control, markdown, result, untitled
from experiments.tables import Table, number, percent, published, source
from npqwen.errors import UserError

MEASURES: dict[str, tuple[str, Callable[[Evidence, str], str]]] = {
    "recall": ("Recall, % [95 % interval]", lambda one, arm: percent(share(one, arm, "recall"))),
    "fabricated": ("Fabricated numbers, % of answers", lambda one, arm: percent(share(one, arm, "fabricated"))),
    "copy_nll": ("Copy NLL, nats a token", lambda one, arm: number(mean(list(one.nll(arm, "copy_nll").values())), 3)),
    "seconds": (
        "Seconds of the median text, measured on a machine shared with other work",
        lambda one, arm: number(seconds(one, arm), 1),
    ),
}


def publish(folder: str | Path, home: Path = HOME) -> list[Path]:
    """Copies each experiment of a run into home/eN/results/MODEL and writes home/eN/RESULT.md anew; the folders.

    Raises UserError for a run that is incomplete, not the protocol's, or made from code that no commit holds.
    """
    made = []
    for one in evidence.read(folder):
        name = one.protocol.name
        reasons = [*one.missing, *one.changes]
        if one.manifest.get("dirty") is not False:
            reasons.append("made from a working tree with uncommitted changes, or outside a repository")
        if reasons:
            raise UserError(f"{folder}: {name} cannot be published: {'; '.join(reasons)}")
        target = home / name / "results" / one.model.replace("/", "--")
        target.mkdir(parents=True, exist_ok=True)
        for file in (f"{name}.jsonl", "manifest.json"):
            shutil.copyfile(Path(folder) / file, target / file)
        (target / "RESULT.md").write_text(result(one), encoding="utf-8", newline="\n")
        made.append(target)
        text = overview([evidence.read(path)[0] for path in results(name, home)])
        (home / name / "RESULT.md").write_text(text, encoding="utf-8", newline="\n")
    if home == HOME:
        update_readme()
    return made


def results(name: str, home: Path = HOME) -> list[Path]:
    """The folders of an experiment's published results, the embedded model first, then by name; none is possible."""
    if not (home / name / "results").is_dir():
        return []
    return sorted((home / name / "results").iterdir(), key=lambda path: (path.name != "tiny", path.name))


# What README shows of the results: the experiment that an arm's figures are taken from, and the arm.
IN_BRIEF = (
    *(("e0", arm) for arm in ("full", "none", "recent/8", "centroid/8", "ffit/8")),
    *(("e1", arm) for arm in ("sign:8", "sign:8+ffit/8", "exact:8", "exact:8+ffit/8")),
    *(
        ("e2", arm)
        for arm in ("lowrank16:8", "lowrank16:64:8", "lowrank16:64:8+ffit/8", "quest16:4", "quest16:4+ffit/8")
    ),
)
SPEED_MARKS = "<!-- speed: written by python tools/bench.py --keep -->\n", "<!-- end of speed -->\n"
MARKS = "<!-- results: written by python -m experiments report DIR --publish -->\n", "<!-- end of results -->\n"


def in_brief(home: Path = HOME) -> str:
    """README's table: recall %, fabricated % and copy NLL of chosen arms, every model that all experiments have."""
    found = {name: {path.name: evidence.read(path)[0] for path in results(name, home)} for name in ("e0", "e1", "e2")}
    models = [model for model in found["e0"] if all(model in of for of in found.values())]

    def cell(one: Evidence, arm: str) -> str:
        shares = (share(one, arm, measure) for measure in ("recall", "fabricated"))
        percents = (number(found.value if found else None, 1, 100) for found in shares)
        return " / ".join((*percents, MEASURES["copy_nll"][1](one, arm)))

    rows = [
        (f"`{arm}`", *(cell(found[name][model], arm) for model in models), published(name, "recall", arm))
        for name, arm in IN_BRIEF
    ]
    return untitled(Table("", ("arm", *models, f"{source()}: recall"), tuple(rows))) + "\n"


def speed_in_brief() -> str:
    """README's other table: what the bench measured against what was wanted, and where."""
    found = speed.results()
    tables = [speed.targets_table(found), speed.profile_table(found)]
    about = "".join(f"- {line}\n" for line in speed.machines())
    parts = [untitled(table) + "\n" for table in tables if table.rows]
    return "\n".join([*parts, about])


def update_readme(path: Path = HOME.parent / "README.md") -> None:
    """Puts both tables between their marks; a README without marks is left as it is."""
    text = path.read_text(encoding="utf-8")
    for (start, end), table in ((MARKS, in_brief()), (SPEED_MARKS, speed_in_brief())):
        before, mark, rest = text.partition(start)
        _, end_mark, after = rest.partition(end)
        if mark and end_mark:
            text = before + mark + table + end_mark + after
    path.write_text(text, encoding="utf-8", newline="\n")


def overview(found: list[Evidence]) -> str:
    """RESULT.md of an experiment: every published model's control, hypotheses and arms beside the published figures."""
    protocol = found[0].protocol
    parts = [
        f"# {protocol.name.upper()}: {protocol.title}",
        "Written from the rows of the models below by `python -m experiments report DIR --publish`; not edited by hand. "
        f"The question and the decision rule stand in [PROTOCOL.md](PROTOCOL.md). {source()}: figures of "
        f"{tables.PUBLISHED['source']['author']}'s report, another program on another model; we did not measure them.",
        "\n".join(f"- [{one.model}](results/{one.model}/RESULT.md). {control(one)}" for one in found),
        markdown(_hypotheses(found)),
        *(markdown(_measure(found, name)) for name in MEASURES),
    ]
    return "\n\n".join(parts) + "\n"


def _hypotheses(found: list[Evidence]) -> Table:
    by_model = [{(f.number, f.claim, f.subject): f for f in judge(one)} for one in found]
    keys = sorted(dict.fromkeys(key for findings in by_model for key in findings), key=lambda key: key[0])
    cells = (
        (*map(str, key), *(f"{f[key].status}: {f[key].evidence}" if key in f else tables.NOTHING for f in by_model))
        for key in keys
    )
    columns = ("no.", "hypothesis", "seen in", *(one.model for one in found))
    return Table("What the decision rule says", columns, tuple(cells))


def _measure(found: list[Evidence], name: str) -> Table:
    title, cell = MEASURES[name]
    experiment, arms = found[0].protocol.name, found[0].protocol.arms
    rows = tuple((arm, *(cell(one, arm) for one in found), published(experiment, name, arm)) for arm in arms)
    return Table(title, ("arm", *(one.model for one in found), source()), rows)
