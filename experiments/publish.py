"""Results that stay: a finished run's rows, manifest and RESULT.md beside its protocol, and all models side by side."""

import shutil
from collections.abc import Callable
from pathlib import Path

from experiments import evidence, tables
from experiments.evidence import Evidence
from experiments.figures import mean, seconds, share
from experiments.hypotheses import judge
from experiments.protocol import HOME
from experiments.report import control, markdown, result
from experiments.tables import Table, number, percent, published, source
from npqwen.errors import UserError

MEASURES: dict[str, tuple[str, Callable[[Evidence, str], str]]] = {
    "recall": ("Recall, % [95 % interval]", lambda one, arm: percent(share(one, arm, "recall"))),
    "fabricated": ("Fabricated numbers, % of answers", lambda one, arm: percent(share(one, arm, "fabricated"))),
    "copy_nll": ("Copy NLL, nats a token", lambda one, arm: number(mean(list(one.nll(arm, "copy_nll").values())), 3)),
    "seconds": (
        "Seconds a text, measured, the machine shared with other work",
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
    return made


def results(name: str, home: Path = HOME) -> list[Path]:
    """The folders of an experiment's published results, the embedded model first, then by name."""
    return sorted((home / name / "results").iterdir(), key=lambda path: (path.name != "tiny", path.name))


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
