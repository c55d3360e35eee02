"""A protocol: every number of an experiment, fixed in a file before its run and known by the hash of its bytes."""

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from npqwen.errors import UserError

HOME = Path(__file__).parent
NLL_MEASURES = ("copy_nll", "new_nll")
QUESTION_MEASURES = ("recall", "exact", "fabricated")
MEASURES = QUESTION_MEASURES + NLL_MEASURES
# Below these there is nothing to measure; a likelihood needs a token to start from and one to score.
LEAST = {"n_texts": 1, "n_facts": 1, "max_new_tokens": 1, "copy_tokens": 2, "new_tokens": 2, "horizon": 1, "n_fit": 1}


@dataclass(frozen=True)
class Family:
    """Pairs (a, b) declared beforehand and corrected together: the difference is a minus b in `measure`."""

    name: str
    measure: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Decision:
    alpha: float  # two-sided, after the Bonferroni correction within a family
    margin: float  # the equivalence bound, a share of questions
    min_gap: float  # recall of `full` minus recall of `none` below which a model says nothing


@dataclass(frozen=True)
class Protocol:
    name: str
    title: str
    seed: int
    n_texts: int
    n_facts: int
    n_tokens: int
    max_new_tokens: int
    copy_tokens: int
    new_tokens: int
    n_sinks: int
    horizon: int
    n_fit: int
    ridge: float
    check_limit: float
    primary: str
    arms: tuple[str, ...]
    decision: Decision
    families: tuple[Family, ...]
    sha256: str


def path_of(name: str) -> Path:
    """The protocol file of an experiment that comes with the project."""
    return HOME / name / "protocol.toml"


def names() -> list[str]:
    """The experiments that exist, in order: e0 e1 e2 first."""
    return sorted(path.parent.name for path in HOME.glob("*/protocol.toml"))


def standard() -> list[str]:
    """The experiments that run when none is named; the others need a model with a longer context, and more time."""
    return [name for name in names() if re.fullmatch(r"e\d", name)]


def load(path: str | Path) -> Protocol:
    """The protocol in a TOML file. A key that is unknown, missing or of another type is a UserError that names it."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such protocol file; experiments here: {', '.join(names())}")
    data = path.read_bytes()
    try:
        table = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    protocol = _fill(Protocol, table, str(path), sha256=hashlib.sha256(data).hexdigest())
    _check(protocol, str(path))
    return protocol


def override(protocol: Protocol, changes: dict[str, Any]) -> Protocol:
    """The protocol with numbers changed by a user, under a hash of its own: such rows are never taken for the protocol's."""
    if not changes:
        return protocol
    known = {f.name for f in fields(Protocol)}
    sha256 = hashlib.sha256((protocol.sha256 + json.dumps(changes, sort_keys=True)).encode()).hexdigest()
    return replace(protocol, sha256=sha256, **{key: value for key, value in changes.items() if key in known})


def with_arms(protocol: Protocol, arms: Sequence[str]) -> Protocol:
    """The protocol with a user's arms between its ceiling and its floor; the families whose arms are all there stay.

    Its hash stays too: an arm's rows are the same whichever arms are measured beside it.
    """
    wanted = tuple(dict.fromkeys(("full", "none", *arms)))
    families = tuple(f for f in protocol.families if all(arm in wanted for pair in f.pairs for arm in pair))
    return replace(protocol, arms=wanted, families=families)


def _fill(cls: Any, table: dict[str, Any], where: str, **extra: Any) -> Any:
    wanted = {f.name: f.type for f in fields(cls) if f.name not in extra}
    for key in table:
        if key not in wanted:
            raise UserError(f"{where}: unknown key '{key}' (known: {', '.join(wanted)})")
    for key in wanted:
        if key not in table:
            raise UserError(f"{where}: missing key '{key}'")
    return cls(**{key: _typed(table[key], kind, f"{where}: {key}") for key, kind in wanted.items()}, **extra)


def _typed(value: Any, kind: Any, where: str) -> Any:
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is float and type(value) in (int, float) and 0 < value < float("inf"):
        return float(value)
    if kind is str and type(value) is str and value:
        return value
    if kind is Decision and type(value) is dict:
        return _fill(Decision, value, where)
    if kind == tuple[str, ...] and type(value) is list:
        return tuple(_typed(item, str, where) for item in value)
    if kind == tuple[str, str] and type(value) is list and len(value) == 2:
        return tuple(_typed(item, str, where) for item in value)
    if kind == tuple[tuple[str, str], ...] and type(value) is list:
        return tuple(_typed(item, tuple[str, str], where) for item in value)
    if kind == tuple[Family, ...] and type(value) is list and all(type(item) is dict for item in value):
        return tuple(_fill(Family, item, where) for item in value)
    wanted = {int: "a whole number, 0 or more", float: "a number above 0", str: "a text"}.get(kind, "another shape")
    raise UserError(f"{where} is {value!r}, expected {wanted}")


def _check(protocol: Protocol, where: str) -> None:
    for name, least in LEAST.items():
        if getattr(protocol, name) < least:
            raise UserError(f"{where}: {name} is {getattr(protocol, name)}, at least {least} is needed")
    arms = protocol.arms
    for arm in arms:
        if arms.count(arm) > 1:
            raise UserError(f"{where}: arms lists '{arm}' twice")
    for arm in ("full", "none"):
        if arm not in arms:
            raise UserError(f"{where}: arms must hold '{arm}', the {'ceiling' if arm == 'full' else 'floor'}")
    for measure in (protocol.primary, *(family.measure for family in protocol.families)):
        if measure not in MEASURES:
            raise UserError(f"{where}: unknown measure '{measure}' (known: {', '.join(MEASURES)})")
    for family in protocol.families:
        for arm in (arm for pair in family.pairs for arm in pair):
            if arm not in arms:
                raise UserError(f"{where}: family '{family.name}' compares '{arm}', which is not among the arms")
