"""The rows of one experiment as a run left them, with what is missing; refused if they do not belong together."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import protocol
from experiments.protocol import NLL_MEASURES, Protocol
from experiments.store import FIELDS, Key, Row, key
from npqwen.errors import UserError

IDENTITY = ("protocol_sha256", "model", "weights_sha256")
Answers = dict[tuple[int, int], bool]


@dataclass(frozen=True)
class Evidence:
    """One experiment: its protocol, the run's manifest, rows by (kind, arm), and what a whole run would add."""

    protocol: Protocol
    manifest: Row
    by_kind: dict[tuple[str, str], list[Row]]
    missing: list[str]

    @property
    def model(self) -> str:
        """The model's name: a hub id as it is, the last part of any other path."""
        name = next(str(rows[0]["model"]) for rows in self.by_kind.values())
        return (
            name if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) else name.replace("\\", "/").rstrip("/").rpartition("/")[2]
        )

    @property
    def changes(self) -> list[str]:
        """Where the user departed from the protocol."""
        return [f"{name} = {value}" for name, value in (self.manifest.get("overrides") or {}).items()]

    @property
    def arms(self) -> list[str]:
        """The protocol's arms that have rows, in its order, then arms that a user added."""
        present = dict.fromkeys(arm for _, arm in self.by_kind)
        declared = [arm for arm in self.protocol.arms if arm in present]
        return declared + [arm for arm in present if arm not in declared]

    @property
    def texts(self) -> list[int]:
        return sorted({row["text"] for rows in self.by_kind.values() for row in rows})

    def of(self, kind: str, arm: str) -> list[Row]:
        return self.by_kind.get((kind, arm), [])

    def answers(self, arm: str, measure: str) -> Answers:
        """Whether each question, by (text, item), counts for a measure: recall, exact, or any outcome by its name."""
        rows = self.of("question", arm)
        if measure in ("recall", "exact"):
            return {(row["text"], row["item"]): bool(row[measure]) for row in rows}
        return {(row["text"], row["item"]): row["outcome"] == measure for row in rows}

    def nll(self, arm: str, measure: str) -> dict[int, float]:
        return {row["text"]: row["nll"] for row in self.of(measure, arm)}

    def values(self, kind: str, arm: str, key: str) -> list[Any]:
        """One entry of the `value` of each row, rows without it left out."""
        return [row["value"][key] for row in self.of(kind, arm) if row["value"] and row["value"].get(key) is not None]


def read(folder: str | Path) -> list[Evidence]:
    """What a folder holds, an Evidence an experiment. Raises UserError if it holds none, or rows that do not belong."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that `python -m experiments run --out` wrote")
    files = sorted(path for path in folder.glob("*.jsonl") if path.stat().st_size)
    if not files:
        raise UserError(f"{folder}: no rows (*.jsonl) in this folder; `python -m experiments run` writes them")
    manifest_file = folder / "manifest.json"
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8")) if manifest_file.is_file() else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{manifest_file}: not valid JSON: {error}") from None
    evidence = [_one(path, manifest) for path in files]
    models = {str(rows[0]["model"]) for one in evidence for rows in one.by_kind.values()}
    if len(models) > 1:
        raise UserError(f"{folder}: rows of several models ({', '.join(sorted(models))}); keep one model a folder")
    return evidence


def _one(path: Path, manifest: Row) -> Evidence:
    if path.stem not in protocol.names():
        raise UserError(f"{path}: no experiment '{path.stem}' (known: {', '.join(protocol.names())})")
    declared = protocol.override(protocol.load(protocol.path_of(path.stem)), manifest.get("overrides") or {})
    missing = [] if manifest else ["manifest.json: machine, versions and commit are unknown"]
    if manifest and not manifest.get("finished"):
        missing.append("the end of the run; the same command resumes it")
    by_kind: dict[tuple[str, str], list[Row]] = defaultdict(list)
    seen: set[Key] = set()
    first: Row = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # no newline after it: the run was killed while it wrote this line
                missing.append(f"{path.name} ends in a line that was cut")
                continue
            raise UserError(f"{path}:{number}: not a JSON row: {line[:60]!r}") from None
        _accept(row, first, declared, f"{path}:{number}")
        first = first or row
        if key(row) in seen:
            raise UserError(f"{path}:{number}: a second row for {' '.join(map(str, key(row)))}")
        seen.add(key(row))
        by_kind[row["kind"], row["arm"]].append(row)
    if not by_kind:
        raise UserError(f"{path}: holds no whole row yet")
    return Evidence(declared, manifest, dict(by_kind), missing + _lacking(declared, by_kind))


def _accept(row: Any, first: Row, declared: Protocol, where: str) -> None:
    if not isinstance(row, dict) or any(name not in row for name in FIELDS):
        lacking = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
        raise UserError(f"{where}: a row without '{lacking[0]}'")
    if row["experiment"] != declared.name:
        raise UserError(f"{where}: a row of experiment '{row['experiment']}' in the file of '{declared.name}'")
    if row["protocol_sha256"] != declared.sha256:
        found, wanted = str(row["protocol_sha256"])[:12], declared.sha256[:12]
        raise UserError(f"{where}: a row of protocol {found}, but {declared.name}/protocol.toml is {wanted}: run again")
    for name in IDENTITY:
        if first and row[name] != first[name]:
            raise UserError(f"{where}: {name} {row[name]!r} among rows of {first[name]!r}; keep one model a folder")


def _lacking(declared: Protocol, by_kind: dict[tuple[str, str], list[Row]]) -> list[str]:
    """What a whole run would still add, arms that lack the same together."""
    lacking: dict[str, list[str]] = defaultdict(list)
    for arm in dict.fromkeys((*declared.arms, *(arm for _, arm in by_kind))):
        for kind in ("question", *NLL_MEASURES, "memory"):
            found, whole = len(by_kind.get((kind, arm), [])), declared.n_texts
            if kind == "question":
                whole *= declared.n_facts
            if found < whole:
                lacking[f"{kind} rows, {found} of {whole}"].append(arm)
    missing = [f"{what}: {', '.join(arms)}" for what, arms in lacking.items()]
    if ("check", "full") not in by_kind:
        missing.append("a check row, so nothing says that the arm path equals plain attention")
    return missing
