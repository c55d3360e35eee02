"""python tools/bench.py [decode batch prefill profile attention selection long ask memory open] [--model FOLDER]

Every figure is measured beside its peers in one run: contenders live in processes of their own, take turns in rotated
order, and a median of their turns is printed with its ratio to ours. Absolute figures say something about this machine
only. Without --model the geometry of Qwen3-0.6B (or --geometry 1.7b) with random weights is written to a temporary folder.

  python tools/bench.py decode prefill                               against the peers that are installed
  python tools/bench.py decode --model FOLDER --bf16-gguf FILE       llama.cpp, too
  python tools/bench.py ask --model FOLDER --kvpress-python PYTHON   kvpress, in an environment of its own
  python tools/bench.py long --geometry 1.7b --keep long             into experiments/speed, the report and README
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # experiments is not installed: it runs from the project's folder
GEOMETRY = {"0.6b": (1024, 3072), "1.7b": (2048, 6144)}  # hidden, mlp width; the rest is the same in both
WORKS = ("decode", "batch", "prefill", "profile", "attention", "selection", "long", "ask", "memory", "open")
KVPRESS = "kvpress float32"
PEERS = ("transformers float32", "transformers bfloat16", "llama.cpp BF16", "llama.cpp Q4_K_M", "npqwen numpy", KVPRESS)
NEEDS = {"transformers": "torch", "llama.cpp": "llama_cpp_python", "npqwen": "numpy", "kvpress": "numpy"}
SELECTORS = ("lowrank16:64:8", "sign:8", "quest16:4")
KEYS = (512, 2048, 8192, 16384, 32768, 65536)
LONG_KEYS = (8192, 32768)
REST = 0.3  # seconds
CONTEXT = 512  # tokens before the decode steps that are timed


def main() -> None:
    args = parse()
    with contextlib.ExitStack() as stack:
        folder = args.model or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not args.model and set(args.work) - {"selection", "attention"}:
            random_model(folder, args.geometry)
        options = {
            "folder": str(folder),
            "threads": args.threads,
            "gguf": {"BF16": args.bf16_gguf, "Q4_K_M": args.q4_gguf},
            "kvpress_python": args.kvpress_python,
        }
        results: dict[str, Any] = {"machine": about(args, folder)}
        for work in args.work:
            rows = globals()[f"bench_{work}"](options, args)
            results[work] = rows
            print_table(work, rows)
    text = json.dumps(results, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(text, encoding="utf-8")
    if args.keep:
        from experiments.publish import update_readme
        from experiments.speed import SPEED

        SPEED.mkdir(exist_ok=True)
        (SPEED / f"{args.keep}.json").write_text(text, encoding="utf-8")
        update_readme()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", default=[], help=f"what to measure: {' '.join(WORKS)} (default: all)")
    parser.add_argument("--model", help="a folder with config.json and *.safetensors")
    parser.add_argument("--geometry", choices=sorted(GEOMETRY), default="0.6b", help="of random weights")
    parser.add_argument("--bf16-gguf", help="a GGUF file of the same weights, for llama.cpp")
    parser.add_argument("--q4-gguf", help="the same quantised to Q4_K_M, for llama.cpp")
    parser.add_argument("--kvpress-python", help="a Python that has kvpress (it pins another transformers)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all that are installed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=5, help="of each contender")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prefill")
    parser.add_argument("--rows", type=int, default=20, help="of a batch")
    parser.add_argument("--arms", nargs="*", default=[s + f for s in SELECTORS for f in ("", "+ffit/8")])
    parser.add_argument("--keys", nargs="*", type=int, default=KEYS, help="lengths of the texts of `selection`")
    parser.add_argument("--long-keys", nargs="*", type=int, default=LONG_KEYS, help="lengths of the texts of `long`")
    parser.add_argument("--json", help="a file for the results")
    parser.add_argument("--keep", metavar="NAME", help="keep the results as experiments/speed/NAME.json, and in README")
    args = parser.parse_args()
    if unknown := set(args.work) - set(WORKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (there are: {' '.join(WORKS)})")
    args.work = args.work or list(WORKS)
    if args.peers is None:
        args.peers = [p for p in PEERS if installed(NEEDS[p.split()[0]])]
        files = {"llama.cpp BF16": args.bf16_gguf, "llama.cpp Q4_K_M": args.q4_gguf, KVPRESS: args.kvpress_python}
        args.peers = [p for p in args.peers if files.get(p, p)]
    return args


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def about(args: argparse.Namespace, folder: Path | str) -> dict[str, Any]:
    """Machine and versions, so that a figure can be read later."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    names = ("npqwen", "numpy", "numba", "torch", "transformers", "llama_cpp_python")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := installed(name))},
        "model": Path(args.model).resolve().name
        if args.model
        else f"random weights, geometry of Qwen3-{args.geometry}",
        "weights_bytes": sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


# Contenders in their processes


class Contender:
    def __init__(self, name: str, options: dict[str, Any]):
        threads = str(options["threads"])
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        self.words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  till close()
        python = options["kvpress_python"] if name == KVPRESS else sys.executable
        self.process = subprocess.Popen(
            [python, str(HERE / "bench_workers.py")],
            env=os.environ | dict.fromkeys(names, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
        )
        self.name = name
        self.first = self.ask(options | {"name": name})

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.words.seek(0)
            last = (self.words.read().split("\n")[-2:] or [""])[0]
            raise SystemExit(f"bench: {self.name} ended with code {code} on {request.get('do', 'opening')}: {last}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.words.close()


@contextlib.contextmanager
def contenders(names: list[str], options: dict[str, Any]) -> Iterator[list[Contender]]:
    them: list[Contender] = []
    try:
        for name in names:
            them.append(Contender(name, options))
        yield them
    finally:
        for one in them:
            one.close()


def turns(measures: dict[str, Callable[[], float]], n: int) -> dict[str, list[float]]:
    """n figures of each, taken in turn; who begins rotates. A round before them warms up and is not counted.

    Before each is a rest: the threads of the one before spin for a while, and would take a core from the next.
    """
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(n + 1):
        for i in range(len(measures)):
            name = list(measures)[(turn + i) % len(measures)]
            time.sleep(REST)
            figure = measures[name]()
            if turn:
                figures[name].append(figure)
    return figures


def rows_of(
    figures: dict[str, list[float]], unit: str, scale: float = 1.0, ours: str = "npqwen"
) -> list[dict[str, Any]]:
    reference = statistics.median(figures[ours])
    return [
        {
            "what": name,
            unit: statistics.median(values) * scale,
            "lowest": min(values) * scale,
            "highest": max(values) * scale,
            "ratio to npqwen": statistics.median(values) / reference,
        }
        for name, values in figures.items()
    ]


# Works


def whole(peers: list[str]) -> list[str]:
    """Those that run a model by themselves."""
    return [peer for peer in peers if peer != KVPRESS]


def bench_decode(options: dict[str, Any], args: argparse.Namespace, rows: int = 1) -> list[dict[str, Any]]:
    """One token after CONTEXT others, and the share of the machine's read bandwidth that its weights make up."""
    peers = [p for p in whole(args.peers) if rows == 1 or not p.startswith("llama.cpp")]

    def measure(one: Contender) -> float:
        if one.name == "machine":
            return float(one.ask({"do": "read_bandwidth"}))
        return statistics.median(one.ask({"do": "steps", "n": 4}))

    with contenders(["npqwen", *peers, "machine"], options) as them:
        for one in them[:-1]:
            one.ask({"do": "prefill", "rows": rows, "n": CONTEXT})
        figures = turns({one.name: partial(measure, one) for one in them}, args.turns)
    bandwidth = statistics.median(figures.pop("machine"))
    table = rows_of(figures, "ms a token" if rows == 1 else f"ms a step of {rows}", 1e3)
    if rows == 1:
        needed = bytes_per_token(Path(options["folder"]))
        for row in table:
            row["share of read bandwidth"] = needed / (row["ms a token"] * 1e-3) / 1e9 / bandwidth
        table.append({"what": "machine", "GB/s read": bandwidth, "GB read for a token": needed / 1e9})
    return table


def bench_batch(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    return bench_decode(options, args, args.rows)


def bench_prefill(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The model's products alone, over the time of the whole prefill, against NumPy's own float32 product."""

    def measure(one: Contender) -> float:
        if one.name == "machine":
            return float(one.ask({"do": "sgemm"}))
        return float(one.ask({"do": "prefill", "rows": 1, "n": args.tokens}))

    with contenders(["npqwen", *whole(args.peers), "machine"], options) as them:
        figures = turns({one.name: partial(measure, one) for one in them}, max(1, args.turns // 2))
    sgemm = statistics.median(figures.pop("machine"))
    table = rows_of(figures, f"s for {args.tokens} tokens")
    flops = products(Path(options["folder"]), args.tokens)
    for row in table:
        row["GF/s"] = flops / row[f"s for {args.tokens} tokens"] / 1e9
        row["share of sgemm"] = row["GF/s"] / sgemm
    return [*table, {"what": "machine", "GF/s": sgemm}]


def bench_profile(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Where our time goes: each stage's share of a prefill, and of decoding one row after it."""
    with contenders(["npqwen"], options) as (ours,):
        seconds = ours.ask({"do": "profile", "n": args.tokens})
    table = []
    for stage in dict.fromkeys([*seconds["prefill"], *seconds["decode"]]):
        shares = {f"% of {name}": 100 * of.get(stage, 0.0) / sum(of.values()) for name, of in seconds.items()}
        table.append({"what": stage} | shares)
    return table


def bench_memory(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Resident memory after a prefill and ten tokens. `own` leaves out mapped files."""
    table = []
    for name in ["npqwen", *whole(args.peers)]:
        with contenders([name], options) as (one,):
            one.ask({"do": "prefill", "rows": 1, "n": args.tokens})
            one.ask({"do": "steps", "n": 10})
            table.append({"what": name} | {f"MB {k}": v for k, v in one.ask({"do": "memory"}).items()})
    for row in table:
        row["ratio to npqwen"] = row["MB peak"] / table[0]["MB peak"]
    return table


def bench_open(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """From the start of a Python process to the first token of a prompt of 8, files in the page cache."""
    for file in Path(options["folder"]).glob("*.safetensors"):
        with open(file, "rb") as f:
            while f.read(1 << 24):
                pass
    figures: dict[str, list[float]] = {name: [] for name in ["npqwen", *whole(args.peers)]}
    for turn in range(args.turns):
        for i in range(len(figures)):
            name = list(figures)[(turn + i) % len(figures)]
            one = Contender(name, options | {"begin": time.time()})
            figures[name].append(one.first)
            one.close()
    return rows_of(figures, "s to the first token")


def bench_attention(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Our dense attention alone: one query token over S keys, kernel against NumPy twin, and bytes per second."""
    from bench_workers import seconds

    from npqwen import attention, kernels, threads

    threads.set_threads(args.threads)
    rng = np.random.default_rng(0)
    K, G, D = 8, 2, 128
    with contenders(["machine"], options) as (machine,):
        bandwidth = statistics.median(machine.ask({"do": "read_bandwidth"}) for _ in range(3))
    table = []
    for S in (2048, 8192, 32768):
        q, k, v = (rng.standard_normal((K, *s, D), dtype=np.float32) for s in ((G, 1), (S,), (S,)))

        def measure(way: Callable[..., Any], q: Any = q, k: Any = k, v: Any = v) -> float:
            return statistics.median(seconds(lambda: way(q, k, v, scale=D**-0.5)) for _ in range(5))

        ways = {"npqwen": kernels.attend, "npqwen numpy": attention.attend}
        figures = turns({name: partial(measure, way) for name, way in ways.items()}, args.turns)
        for row in rows_of(figures, "ms", 1e3):
            row["GB/s"] = 2 * k.nbytes / row["ms"] / 1e6
            table.append({"S": S} | row | {"share of read bandwidth": row["GB/s"] / bandwidth})
    return table


def bench_selection(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One attention step of all layers of a model, for one token and for a batch, over longer and longer texts.

    Bytes are those of a step: keys and values of all records for dense attention; for an arm its index and function once,
    and for each token the records that it looks at. Where memory is short, fewer layers are held and stand for all.
    """
    from experiments.speed import pays_from

    names = ["our layers"] + ["torch layers"] * bool(installed("torch"))
    table: list[dict[str, Any]] = []
    with contenders(names, options) as (ours, *peers):
        for keys in args.keys:
            held, *_ = [one.ask({"do": "fill", "keys": keys}) for one in (ours, *peers)]
            for arm in args.arms:
                costs = ours.ask({"do": "build", "arm": arm})
                for rows in (1, args.rows):
                    table += selection_rows(ours, peers, arm, keys, rows, costs, args.turns)
                    table[-1]["layers held"] = held
                    print(f"  {table[-1]}", file=sys.stderr)
    table.sort(key=lambda row: (row["batch"], args.arms.index(row["what"]), row["keys"]))
    return pays_from(table)


def selection_rows(
    ours: Contender, peers: list[Contender], arm: str, keys: int, rows: int, costs: dict[str, float], n_turns: int
) -> list[dict[str, Any]]:
    """The arm against dense attention and torch, their turns in rotated order."""
    runs = {arm: ours, "dense": ours}
    if peers:
        runs["torch"] = peers[0]
    figures = turns(
        {name: partial(one.ask, {"do": "time", "arm": name, "rows": rows}) for name, one in runs.items()}, n_turns
    )
    ms = {name: statistics.median(values) * 1e3 for name, values in figures.items()}
    row = {
        "what": arm,
        "batch": rows,
        "keys": keys,
        "ms a step": ms[arm],
        "lowest": min(figures[arm]) * 1e3,
        "highest": max(figures[arm]) * 1e3,
        "dense ms": ms["dense"],
        "MB": (costs["index_bytes"] + rows * costs["query_bytes"]) / 1e6,
        "reads share": costs["reads"],
        "limit by reads": 1 / costs["reads"],
        "times faster than dense": ms["dense"] / ms[arm],
    }
    if peers:
        row |= {"torch ms": ms["torch"], "times faster than torch": ms["torch"] / ms[arm]}
    return [row]


def bench_long(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One token of the whole model after a long text, through `full` (dense attention) and through selections.

    The text's keys and values are random numbers: reading so many tokens would take an hour and change no time of a step.
    """
    arms = ["full", *[arm for arm in args.arms if "+" not in arm]]
    table = []
    with contenders(["npqwen memories"], options) as (ours,):
        for keys in args.long_keys:
            ours.ask({"do": "make_up", "keys": keys})
            for arm in arms:
                ours.ask({"do": "build", "arm": arm})
            measures = {arm: partial(ours.ask, {"do": "decode", "arm": arm, "n": 4}) for arm in arms}
            for row in rows_of(turns(measures, args.turns), "ms a token", 1e3, ours="full"):
                times = 1 / row.pop("ratio to npqwen")
                table.append({"what": row.pop("what"), "keys": keys} | row | {"times faster than dense": times})
    return table


def bench_ask(options: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """20 questions of one text, read before, 8 greedy tokens each: all arms of E2, and peers that keep the text cached.

    Peers ask one question after the other, as their pipelines do. Fitting ffit/8 is timed beside reading the text.
    """
    from experiments import protocol
    from experiments.measure import placed_text

    e2 = protocol.load(protocol.path_of("e2"))
    encode = tokenizer(options["folder"]).encode_plain
    text = placed_text(e2, 1, encode)
    ids, questions = [int(i) for i in encode(text.text)], [encode(fact.question) for fact in text.facts]
    request = {"do": "ask", "questions": [[int(i) for i in ids] for ids in questions], "n": e2.max_new_tokens}
    peers = [peer for peer in args.peers if peer.startswith(("transformers", "kvpress"))]
    with contenders(["npqwen memories", *peers], options) as (ours, *others):
        for one in (ours, *others):
            one.ask({"do": "read", "ids": ids})
        for arm in e2.arms:
            ours.ask({"do": "build", "arm": arm})
        measures = {f"npqwen {arm}": partial(ours.ask, request | {"arm": arm}) for arm in e2.arms}
        measures |= {one.name: partial(one.ask, request) for one in others}
        table = rows_of(turns(measures, args.turns), f"s for {len(questions)} questions", ours="npqwen full")
        arms = [row for row in table if row["what"].startswith("npqwen ")]
        slowest = max(arms, key=lambda row: row["ratio to npqwen"])
        table.append(slowest | {"what": "slowest arm", "arm": slowest["what"].removeprefix("npqwen ")})
        fits = {
            "reading": partial(ours.ask, {"do": "read", "ids": ids}),
            "fit": partial(ours.ask, {"do": "fit", "arm": "ffit/8"}),
        }
        figures = turns(fits, max(1, args.turns // 2))
    for row in rows_of(figures, "s", ours="reading"):
        table.append({"what": f"{row['what']} of ffit/8" if row["what"] == "fit" else row["what"], "s": row["s"]})
        table[-1]["ratio to reading"] = row["ratio to npqwen"]
    return table


def tokenizer(folder: str) -> Any:
    """The model's, or for random weights that of the embedded model."""
    from npqwen.model import load

    return load(folder).tokenizer or load("tiny").tokenizer


# The model


def random_model(folder: Path, geometry: str) -> Path:
    """A Qwen3 checkpoint of the real shapes, bf16, tied, with normal weights of standard deviation 0.02."""
    E, F = GEOMETRY[geometry]
    H, K, D, L, V = 16, 8, 128, 28, 151936
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": E, "intermediate_size": F,
        "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": K, "head_dim": D, "vocab_size": V,
        "rope_theta": 1000000, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
        "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151645,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for layer in range(L):
        for name, shape in {
            "input_layernorm": (E,), "post_attention_layernorm": (E,), "self_attn.q_norm": (D,), "self_attn.k_norm": (D,),
            "self_attn.q_proj": (H * D, E), "self_attn.k_proj": (K * D, E), "self_attn.v_proj": (K * D, E),
            "self_attn.o_proj": (E, H * D), "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the format's own writers do, so that nothing starts at an odd address
    normal = np.random.default_rng(0).standard_normal(1 << 24, dtype=np.float32) * np.float32(0.02)
    bits = (normal.view(np.uint32) >> 16).astype(np.uint16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, shape in enumerate(shapes.values()):
            if len(shape) == 1:
                file.write(np.full(shape, 0x3F80, np.uint16).tobytes())
                continue
            left, at = int(np.prod(shape)), i * 65537 % len(bits)  # each matrix another stretch of the same numbers
            while left:
                part = bits[at : at + left]
                file.write(part.tobytes())
                left, at = left - len(part), 0
    return folder


def products(folder: Path, T: int) -> float:
    """Floating-point operations of the layers' products for T tokens; attention and the last row's logits left out."""
    return 2.0 * T * sum(int(np.prod(s)) for name, s in matrices(folder) if ".layers." in name)


def bytes_per_token(folder: Path) -> int:
    """Bytes of weights that one token needs: every matrix once; of an untied embedding only a row."""
    shapes = matrices(folder)
    tied = all(not name.startswith("lm_head") for name, _ in shapes)
    return 2 * sum(int(np.prod(s)) for name, s in shapes if tied or "embed_tokens" not in name)


def matrices(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found += [(k, tuple(v["shape"])) for k, v in header.items() if k != "__metadata__" and len(v["shape"]) == 2]
    return found


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[cell(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print(f"\n{title}")
    for line in cells:
        print(
            "  "
            + "  ".join(
                text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
