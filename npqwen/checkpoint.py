"""Where a checkpoint's files are: "tiny" in the package, a folder, or a hub id "owner/name" through the hub's cache.

A model that the cache holds whole opens without a single connection. Without a revision that is the cached commit; to
follow a branch as it moves, name it (revision="main"). The hub's library is imported only to download.
"""

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

from npqwen.config import read_json
from npqwen.errors import UserError

TINY = Path(__file__).parent / "tiny"
INDEX = "model.safetensors.index.json"
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either will do, the first is preferred
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Checkpoint:
    """`folder` holds at least config.json and weights. `revision` is the commit of a hub snapshot, else None."""

    folder: Path
    source: str
    revision: str | None = None


def find(source: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint that `source` names, downloaded if need be. Raises UserError in one line if it cannot be had."""
    folder = TINY if source == "tiny" else Path(source).expanduser()
    if folder.exists() or not HUB_ID.fullmatch(source):
        _check(folder)
        if revision is not None:
            raise UserError(f"{source}: a revision belongs to a hub id (owner/name), and this is a folder")
        return Checkpoint(folder, source)
    snapshot = _snapshot(source, revision)
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
    if INDEX not in names and not any(n.endswith(".safetensors") for n in names):
        raise UserError(f"{folder}: no *.safetensors here{_instead(names, '.bin', '.pt', '.pth', '.gguf', '.npz')}")


def _instead(names: list[str], *endings: str) -> str:
    found = [n for n in names if n.endswith(endings)]
    if not found:
        return ""
    advice = "npqwen convert reads that format" if found[0].endswith(".gguf") else "that alone cannot be loaded"
    return f", only {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} ({advice})"


def cache_folder() -> Path:
    """The hub's cache, by the variables that its library reads at import; read here at every call instead."""
    env = os.environ
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def _offline() -> str | None:
    """The variable that forbids connections, if one does."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return name
    return None


def _snapshot(source: str, revision: str | None) -> Path:
    """The folder of one commit of a hub model, whole."""
    cached, offline = _cached(source, revision), _offline()
    moves = revision is not None and not COMMIT.fullmatch(revision)  # a branch or tag that was asked for by its name
    if cached and not _missing(cached, optional=True) and not (moves and not offline):
        return cached
    usable = cached is not None and not _missing(cached, optional=False)
    if offline:
        if cached and usable:
            return cached
        raise UserError(f"{_miss(source, revision, cached)}, and {offline} is set: unset it to download")
    try:
        return _download(source, revision or "main")
    except _Unreachable as error:
        if cached and usable:
            warnings.warn(f"{source}: {error}; using the cached commit {cached.name}", stacklevel=4)
            return cached
        raise UserError(f"{error}; {_miss(source, revision, cached)}") from None


def _cached(source: str, revision: str | None) -> Path | None:
    """The snapshot folder of a revision in the cache, whole or not. Without refs, the only snapshot is meant."""
    repository = cache_folder() / f"models--{source.replace('/', '--')}"
    if revision is not None and COMMIT.fullmatch(revision):
        snapshots = [repository / "snapshots" / revision]
    elif (ref := repository / "refs" / (revision or "main")).is_file():
        snapshots = [repository / "snapshots" / ref.read_text(encoding="utf-8").strip()]
    else:
        snapshots = sorted((repository / "snapshots").glob("*")) if revision is None else []
    return snapshots[0] if len(snapshots) == 1 and snapshots[0].is_dir() else None


def _missing(snapshot: Path, *, optional: bool) -> list[str]:
    """Files that a snapshot lacks: config.json and weights, and if `optional` also what a repository may do without.

    The hub's library notes in .no_exist what a commit is known not to have. Dead links count as missing.
    """
    known_absent = snapshot.parent.parent / ".no_exist" / snapshot.name

    def lacks(name: str) -> bool:
        return not (snapshot / name).exists()

    names = ["config.json", *(_shards(snapshot) if not lacks(INDEX) else ["model.safetensors"])]
    if optional:
        names += [n for n in ("generation_config.json", "tokenizer_config.json") if not (known_absent / n).exists()]
        if all(any(lacks(n) for n in names) for names in TOKENIZERS) and not (known_absent / TOKENIZERS[0][0]).exists():
            names.append(TOKENIZERS[0][0])
    return [name for name in names if lacks(name)]


def _shards(folder: Path) -> list[str]:
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{folder / INDEX}: names {name!r} as a file; plain file names are needed")
    return names


class _Unreachable(Exception):
    """The hub did not answer: no connection, or its own failure."""


def _download(source: str, revision: str) -> Path:
    """Fetch what is needed of one commit into the hub's cache, the weights last. Its files may be links or copies."""
    import huggingface_hub
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT") or None

    def get(name: str, revision: str) -> Path | None:
        """The file's path in the cache, None if the repository has none. The library resumes, locks and renames."""
        try:
            return Path(
                huggingface_hub.hf_hub_download(
                    source, name, revision=revision, cache_dir=cache_folder(), endpoint=endpoint
                )
            )
        except errors.GatedRepoError:
            message = "access is restricted (HTTP 403): accept the licence on the model's page and set HF_TOKEN"
        except errors.RepositoryNotFoundError as error:
            code = error.response.status_code
            message = f"no such model on the hub, or a private one (HTTP {code}): check the name, or set HF_TOKEN"
            message += "; no such folder here either"
        except errors.RevisionNotFoundError:
            message = f"the hub has no revision {revision!r} of it"
        except errors.LocalEntryNotFoundError:  # stands for a hub that gives no answer
            raise _Unreachable(f"{source}: the hub cannot be reached for {name}") from None
        except errors.EntryNotFoundError:
            return None
        except errors.HfHubHTTPError as error:
            message = f"the hub answers HTTP {error.response.status_code} for {name}"
            if error.response.status_code == 401:
                message += ": HF_TOKEN is not valid"
        except OSError as error:
            message = f"{name} could not be stored in {cache_folder()} ({error.strerror or 'cut short'}); try again"
        except Exception as error:  # what a cut connection raises depends on the library's version
            message = f"the download of {name} stopped ({type(error).__name__}); try again"
        raise UserError(f"{source}: {message}") from None

    config = get("config.json", revision)
    if config is None:
        raise UserError(f"{source}: the hub's repository has no config.json; it is not a checkpoint in this format")
    commit = config.parent.name  # from here on one commit, even if the branch moves meanwhile
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        get(name, commit)
    any(all(get(name, commit) for name in names) for names in TOKENIZERS)
    index = get(INDEX, commit)
    weights = _shards(index.parent) if index else ["model.safetensors"]
    if absent := [name for name in weights if get(name, commit) is None]:
        raise UserError(f"{source}: the hub's repository has no {absent[0]}; only safetensors weights can be loaded")
    return config.parent


def _miss(source: str, revision: str | None, cached: Path | None) -> str:
    what = f"the cache lacks {', '.join(_missing(cached, optional=False))}" if cached else "not in the cache"
    return f"{source}: revision {revision or 'main'}: {what} ({cache_folder()}, set by HF_HUB_CACHE or HF_HOME)"
