"""A run's folder: one file of rows an experiment, a manifest, a lock. Rows are appended one at a time, never rewritten."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from npqwen.errors import UserError

Row = dict[str, Any]
Key = tuple[str, str, int, int | None]

FIELDS = (
    *("experiment", "protocol_sha256", "model", "weights_sha256", "text", "arm", "kind", "item", "gold", "answer"),
    *("outcome", "recall", "exact", "nll", "value", "seconds"),
)
PACKAGES = ("npqwen", "numpy", "scipy", "numba", "safetensors", "tokenizers", "huggingface-hub")
# What must not change between a run and its resumption: rows of both stand in one file.
IDENTITY = ("model", "revision", "weights_sha256", "protocols", "overrides", "kernels")
# What may: the manifest keeps the first start's, and of each resumption those that differ.
CIRCUMSTANCES = ("commit", "dirty", "versions", "machine", "threads", "jobs")


def key(row: Row) -> Key:
    """What a row is about; a folder never holds two rows of one key."""
    return row["kind"], row["arm"], row["text"], row["item"]


class Store:
    """Rows and manifest of one folder, open for appending."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.done: dict[str, set[Key]] = {}

    def open_rows(self, experiment: str) -> set[Key]:
        """The keys of the rows that are there. A last line cut by a kill is dropped, its row will be made again."""
        path = self._path(experiment)
        found: set[Key] = set()
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            found = {key(json.loads(line)) for line in whole.decode("utf-8").split("\n")[:-1]}
        self.done[experiment] = found
        return found

    def append(self, row: Row) -> None:
        """Writes the row, unless it is there, so that a kill at any moment loses nothing that was written before."""
        assert tuple(row) == FIELDS, f"a row's fields are {FIELDS}"
        done = self.done[row["experiment"]]
        if key(row) in done:
            return
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        with self._path(row["experiment"]).open("a", encoding="utf-8", newline="\n") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        done.add(key(row))

    def start(self, manifest: Row, more: bool) -> None:
        """Writes the manifest, or adds a resumption to the one there; one with no `more` rows to make changes nothing.

        Raises UserError if the folder holds another run.
        """
        path = self.folder / "manifest.json"
        self.manifest = manifest
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            self._check(before, manifest)
            self.manifest = before if before["finished"] and not more else _resumed(before, manifest)
        self._write_manifest()

    def finish(self) -> None:
        """Says in the manifest when the last row was made."""
        self.manifest["finished"] = self.manifest["finished"] or now()
        self._write_manifest()

    def _check(self, before: Row, manifest: Row) -> None:
        for name in IDENTITY:
            was, is_now = before[name], manifest[name]
            if name == "protocols":  # another experiment may join; one that is there must be the same
                was = {e: sha for e, sha in was.items() if e in is_now}
                is_now = {e: sha for e, sha in is_now.items() if e in was}
            if was != is_now:
                raise UserError(f"{self.folder} holds a run with {name} {was}, this one has {is_now}: choose --out")

    def _write_manifest(self) -> None:
        temporary = self.folder / "manifest.json.part"
        text = json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n"
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(self.folder / "manifest.json")

    def _path(self, experiment: str) -> Path:
        return self.folder / f"{experiment}.jsonl"


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The folder's Store, made if need be. A second run into the same folder is refused while the first one lives."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder}: another run is writing here; wait for it or choose another --out") from None
    try:
        yield Store(folder)
    finally:
        lock.release()


def _resumed(before: Row, manifest: Row) -> Row:
    """The first start's manifest with what a later start changes: more texts, arms or experiments, another machine."""
    joined: Row = {
        "protocols": before["protocols"] | manifest["protocols"],
        "seeds": before["seeds"] | manifest["seeds"],
        "arms": before["arms"] | {e: _union(before["arms"].get(e, []), arms) for e, arms in manifest["arms"].items()},
        "texts": max(before["texts"], manifest["texts"]),
    }
    differs = {name: manifest[name] for name in CIRCUMSTANCES if manifest[name] != before[name]}
    resumed = [*before.get("resumed", []), {"started": manifest["started"], **differs}]
    return before | joined | {"finished": None, "resumed": resumed}


def _union(before: list[str], added: list[str]) -> list[str]:
    return list(dict.fromkeys([*before, *added]))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def surroundings() -> Row:
    """Commit, versions and machine: what a result was made with."""
    root = Path(__file__).parent.parent
    commit = _git(root, "rev-parse", "HEAD")
    return {
        "commit": commit,
        "dirty": None if commit is None else bool(_git(root, "status", "--porcelain")),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
