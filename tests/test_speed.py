"""The kernels stay ahead of their NumPy twins. Ratios only, of the fastest of several turns: a busy machine slows both."""

import time

import numpy as np
import pytest
import toy

import npqwen
from npqwen.model import forward, prefill, unembed

GEOMETRY = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
IDS = np.arange(300)
TURNS = 7


def step(model):
    cache = model.new_cache([len(IDS) + 8])
    for _ in prefill(model, cache, [IDS]):
        pass

    def run():
        cache.length_B[:] = len(IDS)
        unembed(model, forward(model, IDS[:1], cache.append([1]), cache.attend))

    return run


def read(model):
    def run():
        for _ in prefill(model, model.new_cache([len(IDS)]), [IDS]):
            pass

    return run


@pytest.mark.parametrize(
    ("work", "at_most"),
    [(step, 0.5), (read, 1.25)],
)
def test_the_kernels_take_at_most_this_share_of_numpys_time(tmp_path, work, at_most):
    folder = toy.save(toy.build(**GEOMETRY).bfloat16(), tmp_path)
    runs = [work(npqwen.load(folder, kernels=kernels)) for kernels in ("numba", "numpy")]
    fastest = [np.inf, np.inf]
    for turn in range(TURNS + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            runs[i]()
            if turn:  # the first compiles
                fastest[i] = min(fastest[i], time.perf_counter() - start)
    assert fastest[0] <= at_most * fastest[1], f"kernels {fastest[0]:.4f} s, NumPy {fastest[1]:.4f} s"
