"""Where a checkpoint's files are: "tiny" in the package, a folder, or a hub id "owner/name" through the hub's cache."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from npqwen import hub
from npqwen.errors import UserError

TINY = Path(__file__).parent / "tiny"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """`folder` holds at least config.json and weights. `revision` is the commit of a hub snapshot, else None."""

    folder: Path
    source: str
    revision: str | None = None


def find(source: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint that `source` names, downloaded if need be. Raises UserError in one line if it cannot be had.

    A folder of that name wins over a hub id. `revision` is a commit, branch or tag of a hub id.
    """
    folder = TINY if source == "tiny" else Path(source).expanduser()
    if folder.exists() or not HUB_ID.fullmatch(source):
        _check(folder)
        if revision is not None:
            raise UserError(f"{source}: a revision belongs to a hub id (owner/name), and this is a folder")
        return Checkpoint(folder, source)
    snapshot = hub.snapshot(source, revision)
    _check(snapshot)
    return Checkpoint(snapshot, source, snapshot.name)


def _check(folder: Path) -> None:
    """UserError if the folder lacks config.json or weights, or holds git-lfs pointers or dead links in their place."""
    if not folder.exists():
        raise UserError(f"{folder}: no such folder (a hub id has the form owner/name)")
    if not folder.is_dir():
        hint = "; npqwen convert makes a folder of it" if folder.suffix == ".gguf" else ""
        raise UserError(f"{folder}: a file; a folder with config.json and *.safetensors is needed{hint}")
    names = sorted(path.name for path in folder.iterdir())
    wanted = [n for n in names if n.endswith((".json", ".safetensors", ".jinja")) or n == "merges.txt"]
    for path in (folder / name for name in wanted):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path}: a link to {os.readlink(path)}, which does not exist")
        if path.is_file():
            with path.open("rb") as file:
                if file.read(23) == b"version https://git-lfs":
                    raise UserError(f"{path}: a git-lfs pointer, not the file itself (git lfs pull fetches it)")
    if "config.json" not in names:
        raise UserError(f"{folder}: no config.json here{_instead(names, '.safetensors', '.gguf')}")
    if hub.INDEX not in names and not any(n.endswith(".safetensors") for n in names):
        raise UserError(f"{folder}: no *.safetensors here{_instead(names, '.bin', '.pt', '.pth', '.gguf', '.npz')}")


def _instead(names: list[str], *endings: str) -> str:
    found = [n for n in names if n.endswith(endings)]
    if not found:
        return ""
    advice = "npqwen convert reads that format" if found[0].endswith(".gguf") else "that alone cannot be loaded"
    return f", only {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} ({advice})"
