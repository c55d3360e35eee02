"""Models of the hub, in the cache that its own library fills. The library is imported only to download.

A model that the cache holds whole opens without a single connection. Without a revision that is the cached commit; to
follow a branch as it moves, name it (revision="main").
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from npqwen.config import read_json
from npqwen.errors import UserError

INDEX = "model.safetensors.index.json"
OPTIONAL = ("generation_config.json", "tokenizer_config.json")
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # either will do, the first is preferred
COMMIT = re.compile(r"[0-9a-f]{40}")
T = TypeVar("T")


def snapshot(source: str, revision: str | None) -> Path:
    """The folder of one commit of a hub model, whole, its name the commit. Its files may be links or copies."""
    cached, offline = _cached(source, revision), _offline()
    may_move = revision is not None and not COMMIT.fullmatch(revision)  # a branch or tag, asked for by its name
    if cached and not may_move and not _missing(cached, with_optional=True):
        return cached
    usable = cached is not None and not _missing(cached, with_optional=False)
    if cached and usable and offline:
        return cached
    what = f"the cache lacks {', '.join(_missing(cached, with_optional=False))}" if cached else "not in the cache"
    miss = f"revision {revision or 'main'}: {what} ({cache_folder()}, set by HF_HUB_CACHE or HF_HOME)"
    if offline:
        raise UserError(f"{source}: {miss}, and {offline} is set: unset it to download")
    try:
        return _download(source, revision or "main")
    except _Unreachable as error:
        if cached and usable:
            warnings.warn(f"{source}: {error}; using the cached commit {cached.name}", stacklevel=4)
            return cached
        raise UserError(f"{source}: {error}; {miss}") from None


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


def _missing(snapshot: Path, *, with_optional: bool) -> list[str]:
    """Files that a snapshot lacks: config.json and weights, and `with_optional` what a repository may do without.

    The library notes in .no_exist what a commit is known not to have. Dead links count as missing.
    """
    known_absent = snapshot.parent.parent / ".no_exist" / snapshot.name

    def lacks(name: str) -> bool:
        return not (snapshot / name).exists()

    names = ["config.json", *(["model.safetensors"] if lacks(INDEX) else _shards(snapshot))]
    if with_optional:
        names += [name for name in OPTIONAL if not (known_absent / name).exists()]
        if all(any(map(lacks, files)) for files in TOKENIZERS) and not (known_absent / TOKENIZERS[0][0]).exists():
            names.append(TOKENIZERS[0][0])
    return [name for name in names if lacks(name)]


def _shards(folder: Path) -> list[str]:
    names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{folder / INDEX}: names {name!r} as a file; plain file names are needed")
    return names


def _download(source: str, revision: str) -> Path:
    """Fetch what is needed of one commit into the cache, the weights last. The library resumes, locks and renames."""
    import huggingface_hub

    endpoint = os.environ.get("HF_ENDPOINT") or None

    def get(name: str, revision: str) -> Path | None:
        """The file's path in the cache, None if the repository has none."""

        def fetch() -> str:
            return huggingface_hub.hf_hub_download(
                source, name, revision=revision, cache_dir=cache_folder(), endpoint=endpoint
            )

        path = _answer(source, name, revision, fetch)
        return None if path is None else Path(path)

    # Asked about first, because the library meets a dead connection with minutes of retries or with an older commit.
    url = huggingface_hub.hf_hub_url(source, "config.json", revision=revision, endpoint=endpoint)
    known = _answer(source, "config.json", revision, lambda: huggingface_hub.get_hf_file_metadata(url))
    if known is None or (config := get("config.json", revision)) is None:
        raise UserError(f"{source}: the hub's repository has no config.json; it is not a checkpoint in this format")
    commit = config.parent.name  # from here on one commit, even if the branch moves meanwhile
    for name in (*OPTIONAL, "chat_template.jinja"):
        get(name, commit)
    any(all(get(name, commit) for name in files) for files in TOKENIZERS)
    index = get(INDEX, commit)
    weights = _shards(index.parent) if index else ["model.safetensors"]
    if absent := [name for name in weights if get(name, commit) is None]:
        raise UserError(f"{source}: the hub's repository has no {absent[0]}; only safetensors weights can be loaded")
    return config.parent


class _Unreachable(Exception):
    """The hub did not answer: no connection, or a failure of its own."""


def _answer(source: str, name: str, revision: str, request: Callable[[], T]) -> T | None:
    """What the request returns, None if the repository has no such file; every other refusal as one line.

    No text of the library's errors is passed on: addresses in them can hold secrets.
    """
    from huggingface_hub import errors

    try:
        return request()
    except errors.GatedRepoError:
        message = "access is restricted (HTTP 403): accept the licence on the model's page and set HF_TOKEN"
    except errors.RepositoryNotFoundError as error:
        code = error.response.status_code
        message = (
            f"no such model on the hub, or a private one (HTTP {code}): check the name, or set HF_TOKEN; "
            "no such folder here either"
        )
    except errors.RevisionNotFoundError:
        message = f"the hub has no revision {revision!r} of it"
    except errors.LocalEntryNotFoundError:  # how the library says that it got no answer
        raise _Unreachable(f"the connection to the hub failed at {name}") from None
    except errors.EntryNotFoundError:
        return None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code >= 500:
            raise _Unreachable(f"the hub answers HTTP {code} for {name}") from None
        message = f"the hub answers HTTP {code} for {name}" + (": HF_TOKEN is not valid" if code == 401 else "")
    except Exception as error:  # the disk's errors have a number; a connection's differ between the library's versions
        if not isinstance(error, OSError) or isinstance(error, ConnectionError) or error.errno is None:
            raise _Unreachable(f"the connection to the hub failed at {name} ({type(error).__name__})") from None
        message = f"{name} cannot be stored in {cache_folder()}: {error.strerror}"
    raise UserError(f"{source}: {message}")
