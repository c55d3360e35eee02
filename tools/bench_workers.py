"""What the bench measures, each contender in a process of its own that waits between its turns.

A worker reads one JSON request a line and answers with one JSON line. Only the process of a peer imports torch.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

FIRST_ID = 100  # prompts are running ids from here on: any text will do, the same for all


class Runner(Protocol):
    """prefill(rows, n) reads rows of n ids each; step() then gives every row one more token, greedily."""

    def prefill(self, rows: int, n: int) -> None: ...
    def step(self) -> None: ...


class Ours:
    def __init__(self, folder: str, threads: int, kernels: str = "numba"):
        import npqwen

        self.model = npqwen.load(folder, kernels=kernels)
        if kernels == "numba":
            from npqwen.threads import set_threads

            set_threads(threads)
        else:
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads)

    def prefill(self, rows: int, n: int) -> None:
        from npqwen.model import prefill, unembed

        self.cache = self.model.new_cache([n + 64] * rows)
        ends: list[np.ndarray] = []
        t = 0
        for hidden_TE in prefill(self.model, self.cache, [np.arange(FIRST_ID, FIRST_ID + n)] * rows):
            last = [(row + 1) * n - 1 - t for row in range(rows)]
            ends += [hidden_TE[i] for i in last if 0 <= i < len(hidden_TE)]
            t += len(hidden_TE)
        self.ids = unembed(self.model, np.stack(ends)).argmax(axis=1)

    def step(self) -> None:
        from npqwen.model import forward, unembed

        positions = self.cache.append(np.ones(len(self.ids), np.int64))
        self.ids = unembed(self.model, forward(self.model, self.ids, positions, self.cache.attend)).argmax(axis=1)

    def profile(self, n: int) -> dict[str, dict[str, float]]:
        """Seconds of every stage of a prefill of n tokens and of 20 tokens after it, one by one."""
        from npqwen.profile import Profile

        profile, model = Profile(self.model), self.model
        self.model = profile.model
        for _ in range(2):  # the first warms up
            profile.start()
            self.prefill(1, n)
            for _ in range(20):
                self.step()
            profile.end()
        self.model = model
        return {"prefill": dict(profile.prefill), "decode": dict(profile.decode)}


class Transformers:
    def __init__(self, folder: str, threads: int, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.torch = torch
        if os.path.exists(os.path.join(folder, "tokenizer.json")):  # to open a checkpoint is to open its tokenizer, too
            AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def prefill(self, rows: int, n: int) -> None:
        ids = self.torch.arange(FIRST_ID, FIRST_ID + n).repeat(rows, 1)
        self.past, self.ids = None, ids
        self.step()

    def step(self) -> None:
        with self.torch.inference_mode():
            out = self.model(self.ids, past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past, self.ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    def read(self, ids: list[int]) -> float:
        self.past = None

        def run() -> None:
            self.ids = self.torch.tensor([ids])
            self.step()

        return seconds(run)

    def ask(self, questions: list[list[int]], n: int) -> float:
        """Seconds for greedy answers of n tokens, one question after the other, on the cached text."""
        past, end = self.past, self.past.get_seq_length()

        def run() -> None:
            for question in questions:
                self.past, self.ids = past, self.torch.tensor([question])
                for _ in range(n):
                    self.step()
                past.crop(end - past.get_seq_length())  # by so many

        return seconds(run)


class KVPress:
    """Its pipeline's own two halves: the text compressed to an eighth while it is read, then each question in turn."""

    def __init__(self, folder: str, threads: int):
        import torch
        from kvpress import ExpectedAttentionPress
        from kvpress.pipeline import KVPressTextGenerationPipeline
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

        torch.set_num_threads(threads)
        self.torch, self.new_cache = torch, DynamicCache
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.pipeline = KVPressTextGenerationPipeline(model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
        self.press = ExpectedAttentionPress(compression_ratio=7 / 8)

    def read(self, ids: list[int]) -> float:
        self.cache, self.length = self.new_cache(), len(ids)

        def run() -> None:
            model = self.pipeline.model
            with self.torch.inference_mode(), self.press(model):
                model.model(input_ids=self.torch.tensor([ids]), past_key_values=self.cache)

        return seconds(run)

    def ask(self, questions: list[list[int]], n: int) -> float:
        def run() -> None:
            for question in questions:
                lengths = [self.cache.get_seq_length(layer) for layer in range(len(self.cache))]
                with self.torch.inference_mode():
                    self.pipeline.generate_answer(self.torch.tensor([question]), self.cache, self.length, n)
                self.pipeline._remove_answer_from_cache(self.cache, lengths)

        return seconds(run)


class LlamaCpp:
    """One row only: its Python binding has no batches of sequences."""

    def __init__(self, file: str, threads: int):
        from llama_cpp import Llama

        self.llama = Llama(file, n_ctx=4096, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def prefill(self, rows: int, n: int) -> None:
        self.llama.reset()
        self.llama.eval(list(range(FIRST_ID, FIRST_ID + n)))

    def step(self) -> None:
        self.llama.eval([self.llama.sample(temp=0.0)])


class OurMemories(Ours):
    """A text, read or made up, and what arms make of it."""

    def read(self, ids: list[int]) -> float:
        import kvmem

        def run() -> None:
            self.reading = kvmem.read(self.model, np.array(ids))

        self.memories: dict[str, Any] = {}
        return seconds(run)

    def make_up(self, keys: int) -> None:
        from kvmem.reading import Reading

        config, rng = self.model.config, np.random.default_rng(keys)
        shape = (config.n_kv_heads, keys, config.head_dim)
        self.reading, self.memories = None, {}  # the text before makes room
        k, v = (tuple(rng.standard_normal(shape, np.float32) for _ in range(config.n_layers)) for _ in range(2))
        self.reading = Reading(self.model, np.arange(keys), k, v, ())

    def build(self, arm: str) -> None:
        import kvmem

        self.memories[arm] = kvmem.build(arm, self.reading)

    def fit(self, arm: str) -> float:
        """Seconds to build it from nothing but the reading."""
        import kvmem

        afresh = replace(self.reading, _derived={})
        return seconds(lambda: kvmem.build(arm, afresh))

    def ask(self, arm: str, questions: list[list[int]], n: int) -> float:
        from kvmem.ask import ask_rows

        return seconds(lambda: ask_rows(self.model, self.memories[arm], questions, n))

    def decode(self, arm: str, n: int) -> float:
        """Seconds of one token after the text and one more token: the median of n, after one that is not counted."""
        from kvmem.ask import open_tails
        from npqwen.model import forward, unembed

        tails, attend = open_tails(self.model, self.memories[arm], [n + 1])

        def step() -> None:
            unembed(self.model, forward(self.model, np.array([FIRST_ID]), tails.append([1]), attend))

        return statistics.median([seconds(step) for _ in range(n + 1)][1:])


GEOMETRY = {"K": 8, "G": 2, "D": 128, "L": 28}  # kv heads, query heads of each, head_dim, layers: of all small Qwen3
HELD_BYTES = 1200 << 20  # of keys and values at most; layers beyond are stood for by these
OTHER_BYTES = 256 << 20  # read between two timings, as a model would read its weights: no index waits in a cache


class Layers:
    """Random keys and values of a text in as many of a model's layers as fit; steps are timed on them and scaled to all."""

    def fill(self, keys: int) -> int:
        """The number of layers that are held."""
        K, D, L = (GEOMETRY[x] for x in "KDL")
        n = max(1, min(L, HELD_BYTES // (2 * K * keys * D * 4)))
        rng = np.random.default_rng(keys)
        self.k, self.v = ([rng.standard_normal((K, keys, D), np.float32) for _ in range(n)] for _ in range(2))
        self.rng, self.other = rng, np.ones(OTHER_BYTES // 8, np.uint64)
        return n

    def time(self, arm: str, rows: int) -> float:
        """Seconds of one attention step of the whole model for `rows` tokens: the median of several, for a second at most.

        After a rest the first is slow for any contender. None was asked before, and each begins with cold caches.
        """
        K, G, D, L = (GEOMETRY[x] for x in "KGDL")
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 5 and (not times or time.perf_counter() - begin < 1):
            step = self.step_of(arm, self.rng.standard_normal((K, G, rows, D), np.float32))
            self.other.sum()
            start = time.perf_counter()
            for layer in range(len(self.k)):
                step(layer)
            times.append((time.perf_counter() - start) / len(self.k) * L)
        return statistics.median(times)

    def step_of(self, arm: str, q_KGTD: np.ndarray) -> Callable[[int], Any]:
        raise NotImplementedError


class OurLayers(Layers):
    """Dense attention of the kernels, and the parts that arms make of the layers."""

    def __init__(self, threads: int):
        from npqwen.model import choose_ops
        from npqwen.threads import set_threads

        set_threads(threads)
        K, G, D = (GEOMETRY[x] for x in "KGD")
        config = SimpleNamespace(n_kv_heads=K, n_heads=K * G, group=G, head_dim=D, scale=D**-0.5)
        self.model: Any = SimpleNamespace(config=config, ops=choose_ops("numba"))

    def build(self, arm: str) -> dict[str, float]:
        """Makes an arm's parts; the share of the cache that it reads by arithmetic, the bytes it holds for a query to read.

        A function's clusters are random ones: fitting them would take hours and change no time of a step.
        """
        from kvmem.mix import Mix, Mixed
        from kvmem.reading import Reading, Region, Settings
        from kvmem.spec import parse

        recipe: Any = parse(arm)
        keys = self.k[0].shape[1]
        reading = Reading(self.model, np.arange(keys), tuple(self.k), tuple(self.v), ())
        regions = [Region(reading, layer, 0, Settings(n_sinks=0)) for layer in range(len(self.k))]
        if isinstance(recipe, Mix):
            selectors = [recipe.selector.build(region) for region in regions]
            self.parts = [Mixed(part, self.clusters(recipe.function.f)) for part in selectors]
        else:
            self.parts = selectors = [recipe.build(region) for region in regions]
        K, G, D, L = (GEOMETRY[x] for x in "KGDL")
        selector = getattr(recipe, "selector", recipe)
        chosen = selectors[0].choose(np.zeros((K, 1, D), np.float32)).shape[2]
        read_again = getattr(selector, "shortlist", 0) or chosen
        return {
            "reads": recipe.reads(keys, D),
            "index_bytes": L * (self.parts[0].stored_bytes - 2 * self.k[0].nbytes),
            "query_bytes": L * K * G * (read_again + chosen) * D * 4,  # a token's own records: keys and values
        }

    def clusters(self, f: int) -> Any:
        from kvmem.centroid import Clusters, n_clusters

        K, D = GEOMETRY["K"], GEOMETRY["D"]
        C = n_clusters(self.k[0].shape[1], D, f)
        c_KCD, w_KCD = self.rng.standard_normal((2, K, C, D), np.float32)
        return Clusters(c_KCD, np.full((K, C), np.log(f), np.float32), w_KCD, D**-0.5, self.model.ops.attend)

    def step_of(self, arm: str, q_KGTD: np.ndarray) -> Callable[[int], Any]:
        if arm == "dense":
            attend, scale = self.model.ops.attend, self.model.config.scale
            return lambda layer: attend(q_KGTD, self.k[layer], self.v[layer], scale=scale)
        return lambda layer: self.parts[layer].state(q_KGTD)


class TorchLayers(Layers):
    """scaled_dot_product_attention with all query heads of a kv head as its rows: nothing is repeated for them."""

    def __init__(self, threads: int):
        import torch

        torch.set_num_threads(threads)
        self.torch = torch

    def step_of(self, arm: str, q_KGTD: np.ndarray) -> Callable[[int], Any]:
        K, G, T, D = q_KGTD.shape
        attend, tensor = self.torch.nn.functional.scaled_dot_product_attention, self.torch.from_numpy
        q = tensor(q_KGTD.reshape(K, 1, G * T, D))
        k, v = ([tensor(x)[:, None] for x in layers] for layers in (self.k, self.v))

        def step(layer: int) -> Any:
            with self.torch.inference_mode():
                return attend(q, k[layer], v[layer])

        return step


class Machine:
    """Ceilings, so the best of five: bytes read per second by all threads, NumPy's own float32 products."""

    def __init__(self, threads: int):
        import numba
        from threadpoolctl import threadpool_limits

        numba.set_num_threads(threads)
        threadpool_limits(threads, user_api="blas")

        @numba.njit(parallel=True)
        def total(x: Any) -> Any:
            sums = np.zeros(1024, np.uint64)
            n = len(x) // 1024
            for i in numba.prange(1024):
                part = np.uint64(0)
                for j in range(np.uint64(i * n), np.uint64(i * n + n)):
                    part += x[j]
                sums[i] = part
            return sums

        self.total = total
        self.bytes = np.ones(1 << 26, np.uint64)
        self.x, self.w = np.ones((2000, 2048), np.float32), np.ones((6144, 2048), np.float32)
        total(self.bytes)

    def read_bandwidth(self) -> float:
        return self.bytes.nbytes / min(seconds(lambda: self.total(self.bytes)) for _ in range(5)) / 1e9

    def sgemm(self) -> float:
        return 2 * self.x.size * len(self.w) / min(seconds(lambda: self.x @ self.w.T) for _ in range(5)) / 1e9


CONTENDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "npqwen": lambda o: Ours(o["folder"], o["threads"]),
    "npqwen numpy": lambda o: Ours(o["folder"], o["threads"], "numpy"),
    "transformers float32": lambda o: Transformers(o["folder"], o["threads"], "float32"),
    "transformers bfloat16": lambda o: Transformers(o["folder"], o["threads"], "bfloat16"),
    "llama.cpp BF16": lambda o: LlamaCpp(o["gguf"]["BF16"], o["threads"]),
    "llama.cpp Q4_K_M": lambda o: LlamaCpp(o["gguf"]["Q4_K_M"], o["threads"]),
    "machine": lambda o: Machine(o["threads"]),
    "npqwen memories": lambda o: OurMemories(o["folder"], o["threads"]),
    "kvpress float32": lambda o: KVPress(o["folder"], o["threads"]),
    "our layers": lambda o: OurLayers(o["threads"]),
    "torch layers": lambda o: TorchLayers(o["threads"]),
}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def resident() -> dict[str, float]:
    """MB in memory now and at most; `own` leaves out pages of mapped files, which the system can drop at any time."""
    fields = {}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssAnon"):
                fields[name] = int(value.split()[0]) / 1024
    return {"peak": fields["VmHWM"], "now": fields["VmRSS"], "own": fields["RssAnon"]}


def answer(runner: Any, request: dict[str, Any]) -> Any:
    what = request["do"]
    if what == "prefill":
        return seconds(lambda: runner.prefill(request["rows"], request["n"]))
    if what == "steps":
        return [seconds(runner.step) for _ in range(request["n"])]
    if what == "memory":
        return resident()
    return getattr(runner, what)(**{name: value for name, value in request.items() if name != "do"})


def serve() -> None:
    options = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints does not get between the answers
    begin = options.pop("begin", None)
    runner = CONTENDERS[options.pop("name")](options)
    if begin is not None:  # of a process that only opens: seconds from its start to the first token
        runner.prefill(1, 8)
        print(json.dumps(time.time() - begin), file=answers, flush=True)
        return
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(runner, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
