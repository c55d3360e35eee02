"""What the rows of one experiment say, as plain tables: one form for the terminal, the page and RESULT.md."""

import math
import tomllib
from dataclasses import dataclass

from experiments import stats
from experiments.decide import Comparison, compare, decide, in_words, undeclared
from experiments.evidence import Evidence
from experiments.figures import layers, lse_error, mean, seconds, share, stored_share
from experiments.hypotheses import judge, shown
from experiments.protocol import HOME

OUTCOMES = ("correct", "misbound", "fabricated", "no_number", "abstained")
PUBLISHED = tomllib.loads((HOME / "published.toml").read_text(encoding="utf-8"))
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def published(experiment: str, measure: str, arm: str = "", pair: tuple[str, str] | None = None) -> str:
    """The figure that the published report prints for an arm or a pair, or a dash."""
    for entry in PUBLISHED["pairs"] if pair else PUBLISHED["arms"]:
        about = list(pair) == entry["pair"] if pair else arm == entry["arm"]
        if about and (entry["experiment"], entry["measure"]) == (experiment, measure):
            return str(entry["value"])
    return NOTHING


def source() -> str:
    return f"published {PUBLISHED['source']['model']}"


def number(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{scale * value:.{digits}f}"


def percent(interval: stats.Interval | None) -> str:
    if interval is None:
        return NOTHING
    return f"{100 * interval.value:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def arms_table(evidence: Evidence) -> Table:
    name, rows = evidence.protocol.name, []
    for arm in evidence.arms:
        mark = "" if arm in evidence.protocol.arms else " †"
        reads = mean(evidence.values("memory", arm, "reads_share"))
        rows.append(
            (
                arm + mark,
                number(stored_share(evidence, arm), 1, 100),
                number(reads, 2, 100),
                percent(share(evidence, arm, "recall")),
                percent(share(evidence, arm, "exact")),
                percent(share(evidence, arm, "fabricated")),
                number(mean(list(evidence.nll(arm, "copy_nll").values())), 3),
                number(mean(list(evidence.nll(arm, "new_nll").values())), 3),
                number(seconds(evidence, arm), 1),
                published(name, "recall", arm),
                published(name, "copy_nll", arm),
            )
        )
    columns = (
        *("arm", "stored %", "reads %", "recall %", "exact %", "fabricated %", "copy NLL", "new NLL", "s a text"),
        *(f"{source()}: recall", f"{source()}: copy NLL"),
    )
    note = (
        "95 % Wilson intervals. Stored: bytes as a share of what full stores. Reads: floats read per query as a share "
        "of the text's keys and values, by arithmetic, not timing. NLL: nats a token, mean over texts. Seconds are "
        "measured, those of the median text."
    )
    if any(row[0].endswith("†") for row in rows):
        note += " † not in the protocol."
    return Table("Arms", columns, tuple(rows), note)


def outcomes_table(evidence: Evidence) -> Table:
    rows = []
    for arm in evidence.arms:
        found = [row["outcome"] for row in evidence.of("question", arm)]
        if found:
            cells = (f"{found.count(o)} ({100 * found.count(o) / len(found):.0f} %)" for o in OUTCOMES)
            rows.append((arm, *cells))
    return Table("Outcomes", ("arm", *(o.replace("_", " ") for o in OUTCOMES)), tuple(rows))


def hypotheses_table(evidence: Evidence) -> Table:
    rows = tuple((str(f.number), f.claim, f.subject, f.status, f.evidence) for f in judge(evidence))
    return Table("Hypotheses", ("no.", "hypothesis", "seen in", "status", "difference [95 %]"), rows)


def pairs_tables(evidence: Evidence) -> list[Table]:
    """One table a declared family, then the pairs that no family declares."""
    rule, tables = evidence.protocol.decision, []
    for family in evidence.protocol.families:
        found = decide(evidence, family)
        rows = tuple((*_pair(one), in_words(one, rule), _published_pair(evidence, one)) for one in found)
        title = f"{family.name[0].upper()}{family.name[1:]} ({family.measure.replace('_', ' ')})"
        tables.append(Table(title, (*_pair_columns(found), "verdict", source()), rows, _pair_note(evidence, found)))
    rest = [one for a, b in undeclared(evidence) if (one := compare(evidence, a, b, "recall"))]
    rows = tuple((one.a, one.b, shown(one), f"{one.gained}:{one.lost}") for one in rest)
    note = "No family declares these, so they get intervals, which no correction widens, and no verdict."
    tables.append(Table("Other pairs (recall)", ("a", "b", "a - b [95 %]", "gained:lost"), rows, note))
    return [table for table in tables if table.rows]


def _pair_columns(found: list[Comparison]) -> tuple[str, ...]:
    if found and found[0].is_nll:
        return ("a", "b", "a - b [95 %]", "texts lower", "sign flip p")
    return ("a", "b", "a - b [95 %]", "gained:lost", "p", "Bonferroni", "Holm", "sign flip p")


def _pair(one: Comparison) -> tuple[str, ...]:
    if one.is_nll:
        lower = sum(value < 0 for value in one.texts.values())
        return (one.a, one.b, shown(one), f"{lower} of {one.n}", p_value(one.flip))
    counts = f"{one.gained}:{one.lost}"
    return (one.a, one.b, shown(one), counts, *map(p_value, (one.p, one.bonferroni, one.holm, one.flip)))


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def _published_pair(evidence: Evidence, one: Comparison) -> str:
    return published(evidence.protocol.name, one.measure, pair=(one.a, one.b))


def _pair_note(evidence: Evidence, found: list[Comparison]) -> str:
    if found and found[0].is_nll:
        return "Paired per text; Student's interval of the mean; the sign flip over six texts cannot go below 0.031."
    return (
        "Exact two-sided McNemar over paired questions; Newcombe's interval; Bonferroni and Holm within this family. "
        "The sign flip takes the texts as the units and cannot go below 0.031."
    )


def texts_table(evidence: Evidence) -> Table:
    """Recall of each arm in each text, then the declared differences."""
    texts, rows = evidence.texts, []
    for arm in evidence.arms:
        answers = evidence.answers(arm, "recall")
        hits = {t: [hit for (text, _), hit in answers.items() if text == t] for t in texts}
        if answers:
            rows.append((arm, *(f"{sum(hits[t])}/{len(hits[t])}" if hits[t] else NOTHING for t in texts)))
    return Table("Questions recalled in each text", ("arm", *(f"text {t}" for t in texts)), tuple(rows))


def differences_table(evidence: Evidence) -> Table:
    texts, rows = evidence.texts, []
    for family in evidence.protocol.families:
        for one in decide(evidence, family):
            form = "{:+.3f}".format if one.is_nll else lambda value: f"{100 * value:+.0f}"
            cells = (form(one.texts[t]) if t in one.texts else NOTHING for t in texts)
            rows.append((f"{one.a} - {one.b}", family.measure.replace("_", " "), *cells))
    note = "Points for shares of questions, nats for NLL."
    return Table(
        "Declared differences in each text", ("pair", "measure", *(f"text {t}" for t in texts)), tuple(rows), note
    )


def selection_table(evidence: Evidence) -> Table:
    rows = []
    for arm in evidence.arms:
        top8 = layers(evidence, arm, "top8_share")
        if top8:
            first = [r["value"]["top8_share"] for r in evidence.of("selection", arm) if r["text"] == 1]
            mass, unique = layers(evidence, arm, "mass_share"), layers(evidence, arm, "unique_records")
            worst = min(top8, key=top8.__getitem__)
            rows.append(
                (
                    arm,
                    number(mean(list(top8.values())), 1, 100),
                    number(mean(first), 1, 100),
                    f"{100 * top8[worst]:.1f} (layer {worst})",
                    number(mean(list(mass.values())), 1, 100),
                    number(mean(list(unique.values())), 1),
                    published(evidence.protocol.name, "top8_first_text", arm),
                )
            )
    columns = ("arm", "top 8 found %", "of text 1 %", "worst layer %", "mass found %", "unique records a head")
    note = "Means over layers and texts. Mass: the share of the text's true attention mass that the selection carries."
    return Table("What the selectors find", (*columns, f"{source()}: text 1"), tuple(rows), note)


def mass_table(evidence: Evidence) -> Table:
    rows = []
    for arm in evidence.arms:
        error = lse_error(evidence, arm)
        if error:
            worst = max(error, key=lambda layer: abs(error[layer]))
            mean_error = number(mean(list(error.values())), 3)
            rows.append((arm, mean_error, f"{error[worst]:+.3f} (layer {worst})"))
    note = "Estimate minus truth, nats. Mean keys can only underestimate a cluster's mass (Jensen)."
    return Table("Error of the log mass", ("arm", "mean over layers", "largest"), tuple(rows), note)


def check_table(evidence: Evidence) -> Table:
    rows = tuple((f"text {row['text']}", f"{row['value']:.2e}") for row in evidence.of("check", "full"))
    limit = evidence.protocol.check_limit
    note = f"Largest |logit difference| of full through the arm path against plain attention; limit {limit:g}."
    return Table("Identity check", ("text", "difference"), rows, note)


def all_tables(evidence: Evidence) -> list[Table]:
    """Every table that has rows, in reading order, but for the hypotheses, which page and RESULT.md put into words."""
    tables = [arms_table(evidence), outcomes_table(evidence), *pairs_tables(evidence)]
    tables += [texts_table(evidence), differences_table(evidence), selection_table(evidence), mass_table(evidence)]
    return [table for table in (*tables, check_table(evidence)) if table.rows]


def remarks(experiment: str) -> list[str]:
    return [entry["text"] for entry in PUBLISHED["remarks"] if entry["experiment"] == experiment]
