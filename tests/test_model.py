"""One forward pass in all its arrangements: whole, stepped, chunked, batched. And what it refuses."""

import json
import subprocess
import sys
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
import toy

import npqwen
from npqwen import model as model_module
from npqwen.errors import UserError
from npqwen.model import forward, prefill, unembed

GEOMETRIES = {
    "groups of 2": {},
    "groups of 3, odd sizes": {"num_attention_heads": 6, "head_dim": 10, "hidden_size": 35},
    "sliding": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen2": {"family": "qwen2"},
}


@pytest.fixture(scope="module", params=["numpy", "numba"])
def kernels(request):
    return request.param


@pytest.fixture(scope="module", params=GEOMETRIES, ids=list(GEOMETRIES))
def model(request, kernels, tmp_path_factory):
    return toy.open_toy(tmp_path_factory.mktemp("toy"), kernels=kernels, seed=3, **GEOMETRIES[request.param])


IDS = np.random.default_rng(5).integers(0, 97, 19)


def stepped(model, ids, counts):
    """Logits of all positions, computed `counts` tokens at a time over one cache."""
    cache = model.new_cache([len(ids)])
    rows, t = [], 0
    for count in counts:
        hidden = forward(model, ids[t : t + count], cache.append([count]), cache.attend)
        rows.append(unembed(model, hidden))
        t += count
    assert t == len(ids)
    return np.concatenate(rows)


def test_a_prefill_and_single_steps_equal_one_pass_at_every_split(model):
    want = npqwen.logits(model, IDS)
    for n in range(1, len(IDS)):
        got = stepped(model, IDS, [n] + [1] * (len(IDS) - n))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 7, 11])
def test_chunks_of_any_size_equal_one_pass(model, chunk, monkeypatch):
    want = npqwen.logits(model, IDS)
    monkeypatch.setattr(model_module, "CHUNK", chunk)
    np.testing.assert_allclose(npqwen.logits(model, IDS), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("chunk", [4, 1024])
def test_rows_of_unequal_length_equal_each_alone_then_step_by_step(model, order, chunk, monkeypatch):
    rows = [IDS[:2], IDS[3:14], IDS[5:10]]
    alone = [npqwen.logits(model, np.append(row, [7, 8])) for row in rows]
    monkeypatch.setattr(model_module, "CHUNK", chunk)
    batch = [rows[i] for i in order]
    cache = model.new_cache([len(row) + 2 for row in batch])
    got = unembed(model, np.concatenate(list(prefill(model, cache, batch))))
    want = np.concatenate([alone[i][:-2] for i in order])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    for step, token in enumerate([7, 8]):
        hidden = forward(model, np.full(3, token), cache.append([1, 1, 1]), cache.attend)
        want = np.stack([alone[i][len(rows[i]) + step] for i in order])
        np.testing.assert_allclose(unembed(model, hidden), want, rtol=0, atol=1e-5)


def test_a_step_feeds_one_row_and_not_the_whole_text(model, monkeypatch):
    seen = []
    linear = model.ops.linear
    watched = replace(model.ops, linear=lambda x, w: seen.append(len(x)) or linear(x, w))
    stepped(replace(model, ops=watched), IDS, [len(IDS) - 1, 1])
    assert set(seen) == {len(IDS) - 1, 1}


def test_a_sliding_layer_forgets_what_left_its_window(kernels, tmp_path):
    changes = {"num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    model = toy.open_toy(tmp_path, kernels=kernels, **changes)
    a, b = IDS[:10].copy(), IDS[:10].copy()
    b[0] = (a[0] + 1) % 97
    difference = np.abs(npqwen.logits(model, a) - npqwen.logits(model, b)).max(axis=1)
    assert np.all(difference[4:] == 0)
    assert difference[3] > 1e-3


def test_every_activation_is_float32(model, monkeypatch):
    seen = []

    def watch(name):
        function = getattr(model.ops, name)

        def watched(*arrays, **named):
            result = function(*arrays, **named)
            for array in [*arrays, *named.values(), *(result if isinstance(result, tuple | list) else [result])]:
                if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                    seen.append((name, array.dtype))
            return result

        return watched

    names = [field.name for field in fields(model.ops) if field.name != "name"]
    watched = replace(model, ops=replace(model.ops, **{name: watch(name) for name in names}))
    cache = watched.new_cache([len(IDS)])
    hidden = forward(watched, IDS, cache.append([len(IDS)]), cache.attend)
    assert unembed(watched, hidden).dtype == hidden.dtype == cache.k_LKSD.dtype == np.float32
    assert {dtype for _, dtype in seen} == {np.dtype(np.float32)}
    assert {name for name, _ in seen} == set(names)


def test_both_spellings_of_the_rope_settings_give_bit_equal_logits(kernels, tmp_path):
    folder = toy.save(toy.build(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    new = npqwen.logits(npqwen.load(folder, kernels=kernels), IDS)
    theta = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": None}))
    np.testing.assert_array_equal(npqwen.logits(npqwen.load(folder, kernels=kernels), IDS), new)


def test_the_two_kernels_agree(tmp_path):
    folder = toy.save(toy.build(seed=9), tmp_path)
    plain, fast = (npqwen.logits(npqwen.load(folder, kernels=name), IDS) for name in ("numpy", "numba"))
    np.testing.assert_allclose(fast, plain, rtol=0, atol=2e-5)
    with pytest.raises(UserError, match=r"kernels 'cuda' is unknown \(numpy, numba, auto\)"):
        npqwen.load(folder, kernels="cuda")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "no token ids"),
        (np.array([]), "no token ids"),
        ([3, 97], "token id 97 is outside the model's vocabulary of 97"),
        ([-1], "token id -1 is outside"),
        ([1.5, 2.0], "whole numbers, not float64"),
        ([[1, 2]], r"shape \(1, 2\)"),
    ],
)
def test_ids_are_checked_at_the_door(model, ids, says):
    with pytest.raises(UserError, match=says):
        npqwen.logits(model, ids)


def test_the_last_id_of_the_vocabulary_is_accepted(model):
    assert npqwen.logits(model, [96]).shape == (1, 97)


def test_a_prefill_does_not_compute_logits_of_the_whole_prompt(tmp_path):
    model = toy.open_toy(tmp_path, vocab_size=30000, max_position_embeddings=2048)
    prompt = np.arange(1024) % 30000
    next(npqwen.generate(model, prompt, 1))
    tracemalloc.start()
    next(npqwen.generate(model, prompt, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # all rows of logits would be 123 MB


def test_importing_is_quick_and_never_brings_torch():
    code = "import sys, time; t = time.perf_counter(); import npqwen, kvmem; s = time.perf_counter() - t;"
    code += (
        "bad = {'torch', 'transformers', 'numba', 'huggingface_hub'} & set(sys.modules); print(s); assert not bad, bad"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    assert all(run.returncode == 0 for run in runs), runs[0].stderr
    assert min(float(run.stdout) for run in runs) < 1.0


def test_no_module_outside_tests_and_tools_imports_torch():
    import ast
    from pathlib import Path

    root = Path(npqwen.__file__).parent.parent
    for folder in ("npqwen", "kvmem", "experiments"):
        for path in (root / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {name.split(".")[0] for name in names} & {"torch", "transformers"}, path
