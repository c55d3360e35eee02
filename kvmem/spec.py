"""Arms by name. A spec is a recipe: parse(str(arm)) == arm, and the spec stands in every row of a result."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvmem.centroid import Centroid
from kvmem.fitted import Ffit, Frand
from kvmem.memory import Arm
from kvmem.mix import Mix
from kvmem.records import Full, Nothing, Random, Recent
from kvmem.select import Exact, LowRank, Quest, RandomPick, Sign
from npqwen.errors import UserError

# Form of the spec -> what it makes. A letter in the form is a whole number of 1 or more, passed in this order.
BUDGETED: dict[str, Callable[..., Arm]] = {"recent/f": Recent, "random/f": Random}
FUNCTIONS: dict[str, Callable[..., Arm]] = {"centroid/f": Centroid, "ffit/f": Ffit, "frand/f": Frand}
SELECTORS: dict[str, Callable[..., Arm]] = {
    "exact:k": Exact,
    "sign:k": Sign,
    "lowrank r:k": LowRank,
    "lowrank r:c:k": lambda r, c, k: LowRank(r, k, shortlist=c),
    "quest p:k": Quest,
    "random:k": RandomPick,
}
WHOLE: dict[str, Callable[..., Arm]] = {"full": Full, "none": Nothing}


def parse(spec: str | Arm) -> Arm:
    """The arm of a spec such as ffit/8, sign:8 or lowrank16:64:8+ffit/8. UserError with the known forms otherwise.

    An arm, of ours or of yours, is its own parse.
    """
    if not isinstance(spec, str):
        if hasattr(spec, "build"):
            return spec
        raise UserError(f"arm {spec!r}: a spec in words is needed, such as 'ffit/8'")
    selector, plus, function = spec.strip().partition("+")
    if plus:
        return Mix(_one(selector, SELECTORS, spec), _one(function, FUNCTIONS, spec))
    return _one(selector, WHOLE | BUDGETED | FUNCTIONS | SELECTORS, spec)


def _one(text: str, forms: dict[str, Callable[..., Arm]], spec: str) -> Arm:
    for form, make in forms.items():
        if match := re.fullmatch(_pattern(form), text):
            return make(*(int(number) for number in match.groups()))
    known = ", ".join(form.replace(" ", "") for form in forms)
    where = f"{text!r} in arm {spec!r}" if text != spec else f"arm {spec!r}"
    raise UserError(f"{where} is unknown; here one of {known} works (letters stand for numbers from 1)")


def _pattern(form: str) -> str:
    """ "lowrank r:c:k" -> lowrank, number, colon, number, colon, number."""
    return re.sub(r"(?<=[ /:])[a-z]\b", "([1-9][0-9]{0,8})", form).replace(" ", "")
