"""python -m experiments run: every arm of the protocols on every text, resumable, then the report."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from experiments import protocol as protocols
from experiments.facts import Fact
from experiments.protocol import Protocol
from experiments.score import numbers, plain_digits
from experiments.store import FIELDS, Key, Row, now, opened, surroundings
from npqwen.cli import add_model
from npqwen.errors import UserError

if TYPE_CHECKING:
    from npqwen.model import Model

# What decides a measurement: experiments that agree on these share the reading of a text and their common arms.
SHARED = ("seed", "n_facts", "n_tokens", "copy_tokens", "new_tokens", "n_sinks", "horizon", "n_fit", "ridge")


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know, and what is there already."""

    source: str
    revision: str | None
    kernels: str
    protocols: tuple[Protocol, ...]
    own: tuple[str, tuple[Fact, ...]] | None
    identity: dict[str, str]
    done: dict[str, frozenset[Key]] = field(default_factory=dict)

    def units(self, text: int) -> list[tuple[Protocol, str]]:
        """(experiment, arm) pairs of a text that lack rows. An arm's memory row is written last and stands for all."""
        return [
            (protocol, arm)
            for protocol in self.protocols
            for arm in protocol.arms
            if ("memory", arm, text, None) not in self.done.get(protocol.name, ())
        ]


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    chosen = [protocols.load(protocols.path_of(name)) for name in args.experiments or protocols.standard()]
    own = read_own(args.text_file, args.question_file)
    chosen, overrides = with_overrides(chosen, args.arms, args.seed, own)
    check_arms(chosen)
    limit = min(protocol.n_texts for protocol in chosen)
    n_texts = limit if args.texts is None else args.texts
    if not 1 <= n_texts <= limit:
        raise UserError(f"--texts {args.texts}: 1 to {limit} texts exist")
    if args.seed is not None and args.seed < 0:
        raise UserError(f"--seed {args.seed}: 0 or more is needed")
    if args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: 1 or more is needed")
    folder = Path(args.out or Path("runs") / re.sub(r"[^\w.-]+", "-", str(args.model)).strip("-."))

    from npqwen import load

    model = load(args.model, revision=args.revision, kernels=args.kernels)
    weights_sha256 = model.weights.sha256()
    name = args.model if model.revision or args.model == "tiny" else model.folder.resolve().name  # no private paths
    identity = {"model": name, "weights_sha256": weights_sha256}
    with opened(folder) as store:
        done = {protocol.name: frozenset(store.open_rows(protocol.name)) for protocol in chosen}
        plan = Plan(args.model, model.revision, args.kernels, tuple(chosen), own, identity, done)
        texts = [text for text in range(1, n_texts + 1) if plan.units(text)]
        total = sum(len(plan.units(text)) for text in texts)
        store.start(
            more=total > 0,
            manifest={
                **surroundings(),
                **identity,
                "revision": model.revision,
                "protocols": {protocol.name: protocol.sha256 for protocol in chosen},
                "overrides": overrides,
                "texts": n_texts,
                "arms": {protocol.name: list(protocol.arms) for protocol in chosen},
                "seeds": {protocol.name: protocol.seed for protocol in chosen},
                "kernels": model.ops.name,
                "threads": thread_count(args.jobs),
                "jobs": args.jobs,
                "started": now(),
                "finished": None,
            },
        )
        with tqdm(total=total, unit="arm", disable=not total, mininterval=1.0, smoothing=0.1) as bar:
            for row in produce(plan, model, texts, args.jobs):
                check_identity(row, chosen)
                store.append(row)
                if row["kind"] == "memory":
                    bar.update()
                bar.set_postfix_str(f"{row['experiment']} text {row['text']} {row['arm']}", refresh=False)
        store.finish()

    from experiments.report import report

    print(f"\n{report(folder)}")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m experiments run",
        description="Run experiments and write rows, a manifest and a report into a folder. The same command resumes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=(
            "examples:\n"
            "  python -m experiments run                                    all of them, on the embedded model\n"
            "  python -m experiments run e2 --model Qwen/Qwen3-1.7B --texts 2 --out runs/first\n"
            "  python -m experiments run e2 --arms sign:32 lowrank32:128:16+ffit/8   (full and none come along)\n"
            "  python -m experiments run e2 --text-file my.txt --question-file my.tsv\n"
            "      my.tsv: a question, a tab and the number that answers it, one a line"
        ),
    )
    top.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help="e0 e1 e2 (default: these) long8 long16 (one long text)"
    )
    add_model(top)
    top.add_argument("--out", help="folder of the results (default: runs/MODEL)")
    top.add_argument("--texts", type=int, help="only the first N texts")
    top.add_argument("--arms", nargs="+", metavar="SPEC", help="these arms instead of the protocol's")
    top.add_argument("--seed", type=int, help="another seed than the protocol's")
    top.add_argument("--text-file", help="your own text (UTF-8) instead of ours")
    top.add_argument("--question-file", help="questions to it, each with a tab and the number that is right")
    top.add_argument(
        "--jobs", type=int, default=1, help="texts at a time, in processes that share the cores (default: 1)"
    )
    return top


def produce(plan: Plan, model: Model, texts: Sequence[int], jobs: int) -> Iterator[Row]:
    """Rows of all texts, as they are made: here, or in `jobs` processes that take every jobs-th text each."""
    if jobs == 1 or len(texts) < 2:
        for text in texts:
            yield from text_rows(plan, model, text)
        return
    jobs = min(jobs, len(texts))
    spawn = multiprocessing.get_context("spawn")  # a forked child would inherit threads that do not exist in it
    for name in ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(thread_count(jobs))
    workers: dict[Any, Any] = {}  # the end that we read -> the process that writes
    try:
        for i in range(jobs):
            ours, theirs = spawn.Pipe(duplex=False)
            workers[ours] = spawn.Process(target=work, args=(plan, texts[i::jobs], theirs), daemon=True)
            workers[ours].start()
            theirs.close()  # the worker holds the only one now: when it ends, however it ends, we read the end of file
        yield from gather(workers)
    finally:
        for worker in workers.values():
            worker.terminate()


def gather(workers: dict[Any, Any]) -> Iterator[Row]:
    """Rows of all workers as they come. Raises what a worker raised, and ChildProcessError if one ended without a word."""
    open_ends: list[Any] = list(workers)
    while open_ends:
        ready: list[Any] = multiprocessing.connection.wait(open_ends)
        for end in ready:
            try:
                message = end.recv()
            except EOFError:
                workers[end].join()
                raise ChildProcessError(
                    f"a process of --jobs ended with code {workers[end].exitcode} (-9: killed, often for want of "
                    f"memory); no finished row is lost, the same command resumes, with fewer --jobs if memory is short"
                ) from None
            if message is None:
                open_ends.remove(end)
            elif isinstance(message, Exception):
                raise message
            else:
                yield message


def work(plan: Plan, texts: Sequence[int], pipe: Any) -> None:
    """A process's share of the texts. It writes no file, and ends when nobody is left to take its rows."""
    from npqwen import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        model = load(plan.source, revision=plan.revision, kernels=plan.kernels)
        for text in texts:
            for row in text_rows(plan, model, text):
                pipe.send(row)
        pipe.send(None)
    except BrokenPipeError:
        return
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
            error = RuntimeError(f"{type(error).__name__}: {error}")  # what any process can be sent
        pipe.send(error)


def text_rows(plan: Plan, model: Model, text: int) -> Iterator[Row]:
    """Rows of one text under every protocol; what two protocols would measure alike is measured once."""
    from experiments import measure

    subjects: dict[Any, Any] = {}
    results: dict[Any, list[dict[str, Any]]] = {}
    for protocol, arm in plan.units(text):
        shared = tuple(getattr(protocol, name) for name in SHARED)
        if shared not in subjects:
            subject = measure.prepare(model, protocol, text, plan.own)
            subjects[shared] = subject, measure.identity_gap(model, subject)
        subject, gap = subjects[shared]
        yield complete(plan, protocol, text, "full", {"kind": "check", "value": gap})
        if (shared, arm, protocol.max_new_tokens) not in results:
            results[shared, arm, protocol.max_new_tokens] = measure.measure(model, subject, arm, protocol)
        for row in results[shared, arm, protocol.max_new_tokens]:
            yield complete(plan, protocol, text, arm, row)


def complete(plan: Plan, protocol: Protocol, text: int, arm: str, row: dict[str, Any]) -> Row:
    """The row with all its fields, in order; null where one does not apply."""
    known = {"experiment": protocol.name, "protocol_sha256": protocol.sha256, "text": text, "arm": arm} | plan.identity
    return {name: (known | row).get(name) for name in FIELDS}


def check_identity(row: Row, chosen: Sequence[Protocol]) -> None:
    """Stops the run if the `full` arm is not plain attention: then no arm's result means anything."""
    if row["kind"] == "check":
        limit = next(protocol.check_limit for protocol in chosen if protocol.name == row["experiment"])
        if not row["value"] <= limit:
            raise FloatingPointError(
                f"text {row['text']}: 'full' differs from plain attention by {row['value']:.2e} in its logits, "
                f"the limit is {limit:.0e}; the run stops here"
            )


def with_overrides(
    chosen: Sequence[Protocol], arms: Sequence[str] | None, seed: int | None, own: tuple[str, tuple[Fact, ...]] | None
) -> tuple[list[Protocol], dict[str, Any]]:
    """Protocols as the command line changes them. Another seed or text makes another hash: such rows stand apart."""
    from kvmem.spec import parse

    overrides: dict[str, Any] = {}
    if seed is not None:
        overrides["seed"] = seed
    if own is not None:
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        overrides |= {"own_text": digest, "n_texts": 1, "n_facts": len(own[1])}
    changed = [protocols.override(protocol, overrides) for protocol in chosen]
    if arms is not None:
        specs = [str(parse(arm)) for arm in arms]  # as rows name them: no stray space
        changed = [protocols.with_arms(protocol, specs) for protocol in changed]
    return changed, overrides


def check_arms(chosen: Sequence[Protocol]) -> None:
    """Unknown specs are found before the model is opened; what a text is too short for, build() says."""
    from kvmem.spec import parse

    for protocol in chosen:
        for arm in protocol.arms:
            parse(arm)


def read_own(text_file: str | None, question_file: str | None) -> tuple[str, tuple[Fact, ...]] | None:
    """A user's text and questions. UserError if one comes without the other, or a line has no number."""
    if text_file is None and question_file is None:
        return None
    if text_file is None or question_file is None:
        raise UserError("--text-file and --question-file belong together: a text, and questions whose answer it holds")
    text = _read(text_file)
    facts = []
    for number, line in enumerate(_read(question_file).split("\n"), 1):
        if not line.strip():
            continue
        question, tab, gold = line.rpartition("\t")
        gold = plain_digits(gold.strip())
        if not tab or not gold.isdecimal() or not question.strip():
            raise UserError(f"{question_file}:{number}: a question, a tab and a number are needed, found {line[:60]!r}")
        if gold not in numbers(text):
            raise UserError(f"{question_file}:{number}: the text does not hold the number {gold}")
        facts.append(Fact("", gold, "", f"\n\nQuestion: {question.strip()} Answer:"))
    if not facts:
        raise UserError(f"{question_file}: no question in it")
    return text, tuple(facts)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        found = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read as a UTF-8 text file: {found}") from None


def thread_count(jobs: int) -> int:
    """Threads of each of `jobs` processes."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // jobs)
