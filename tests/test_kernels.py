"""Every compiled kernel equals its NumPy twin: at awkward sizes, anywhere in memory, on 1 and 2 threads, beside NaN."""

import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from npqwen import attention, layers

kernels = pytest.importorskip("npqwen.kernels")
from npqwen import kernels_linear, kernels_tiles, threads  # noqa: E402

SIZES = (0, 1, 15, 16, 17, 63, 64, 65)
PACKAGE = Path(layers.__file__).parent


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def stored(w_NE, dtype):
    """float32 weights as a checkpoint stores them; bf16 by truncation."""
    if dtype == np.uint16:
        return (w_NE.view(np.uint32) >> 16).astype(np.uint16)
    return w_NE.astype(dtype)


@pytest.fixture(params=[1, 2])
def n_threads(request):
    before = threads.workers()
    if request.param > threads.most():
        pytest.skip("one core")
    threads.set_threads(request.param)
    yield request.param
    threads.set_threads(before)


def on_threads(n, function):
    before = threads.workers()
    threads.set_threads(n)
    try:
        return function()
    finally:
        threads.set_threads(before)


two_threads = pytest.mark.skipif(threads.most() < 2, reason="one core")


@pytest.fixture(params=["vectors", "tiles"])
def tiles(request, monkeypatch):
    if request.param == "tiles" and not kernels_tiles.available():
        pytest.skip("this machine has no matrix tiles")
    monkeypatch.setattr(kernels_linear, "TILES", request.param == "tiles")


# linear


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("T", [*SIZES, 2, 5, 6, 7, 61])
def test_linear_equals_numpy_at_awkward_sizes(dtype, T, n_threads, tiles):
    for N in SIZES:
        for E in SIZES[1:]:
            x, w = normal(T, E), stored(normal(N, E, seed=1), dtype)
            got = kernels.linear(x, w)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, layers.linear(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 20, 70])
def test_linear_equals_numpy_when_a_row_takes_several_blocks(T, tiles):
    for E in (1025, 1056, 2048, 3001):
        x, w = normal(T, E), stored(normal(37, E, seed=1), np.uint16)
        typical = math.sqrt(E)  # of a product of normal rows
        np.testing.assert_allclose(kernels.linear(x, w), layers.linear(x, w), rtol=0, atol=5e-6 * typical)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_linear_reads_weights_from_any_byte_of_a_read_only_file(tmp_path, dtype, T, offset):
    w, x = stored(normal(33, 50), dtype), normal(T, 50, seed=1)
    (tmp_path / "w").write_bytes(bytes(offset) + w.tobytes())
    mapped = np.memmap(tmp_path / "w", np.uint8, "r", offset)[: w.nbytes].view(dtype).reshape(w.shape)
    np.testing.assert_array_equal(kernels.linear(x, mapped), kernels.linear(x, w))
    np.testing.assert_allclose(kernels.linear(x, mapped), layers.linear(x, w), rtol=1e-5, atol=1e-5)


def test_linear_widens_every_kind_of_bf16_number_exactly():
    bits = np.array([0x3F80, 0x4049, 0xC000, 0x3DCD, 0x0001, 0x7F80, 0x8000], np.uint16)
    want = (bits.astype(np.uint32) << 16).view(np.float32)
    for T in (1, 8):
        np.testing.assert_array_equal(kernels.linear(np.ones((T, 1), np.float32), bits[:, None]), [want] * T)


def test_linear_on_tiles_rounds_no_activation():
    """The identity gives x back bit by bit: 24 bits go through tiles that take 8. Infinity and NaN go through too."""
    x = normal(40, 64) * np.float32(10.0) ** np.arange(-16, 24, dtype=np.float32)[:, None]
    if kernels_tiles.available():
        assert kernels_tiles.fit(stored(np.eye(64, dtype=np.float32), np.uint16))
    np.testing.assert_array_equal(kernels.linear(x, stored(np.eye(64, dtype=np.float32), np.uint16)), x)
    x[7, 3], x[8, 5] = np.inf, np.nan
    got = kernels.linear(x, stored(np.ones((64, 64), np.float32), np.uint16))
    assert np.isposinf(got[7]).all()
    assert np.isnan(got[8]).all()
    assert np.isfinite(np.delete(got, [7, 8], 0)).all()


@pytest.mark.parametrize(("T", "N", "E"), [(100, 100, 2048), (300, 600, 1056)])
def test_linear_is_about_as_exact_as_numpy(T, N, E, tiles):
    """Over many blocks of everything. The tiles' sums are the more exact ones, those of the vectors go one by one."""
    x, w = normal(T, E), stored(normal(N, E, seed=1), np.uint16)
    exact = x.astype(np.float64) @ layers.widen(w).T.astype(np.float64)
    error, theirs = (np.sqrt(np.mean((got - exact) ** 2)) for got in (kernels.linear(x, w), layers.linear(x, w)))
    assert error < theirs * (1 if kernels_linear.TILES else 3)


@pytest.mark.parametrize("E", [40, 64])
def test_linear_keeps_nan_and_inf_in_their_own_rows(E, tiles):
    x, w = normal(9, E), stored(normal(21, E, seed=1), np.uint16)
    x[3, 5], w[7, 6] = np.nan, 0x7F80
    got = kernels.linear(x, w)
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(np.delete(got, 3, 0), 7, 1)).all()
    assert np.isinf(np.delete(got[:, 7], 3)).all()


def test_linear_refuses_weights_it_cannot_read():
    with pytest.raises(ValueError, match="int8"):
        kernels.linear(normal(1, 4), np.ones((3, 4), np.int8))
    with pytest.raises(ValueError, match="does not fit"):
        kernels.linear(normal(1, 4), np.ones((3, 5), np.float32))


@pytest.mark.parametrize("T", [0, 1, 20])
def test_linears_gives_each_matrix_its_own_product(T):
    x, w = normal(T, 40), [stored(normal(n, 40, seed=n), np.uint16) for n in (33, 0, 65)]
    for n in (1, 2, 3):
        for got, one in zip(kernels.linears(x, *w[:n]), w, strict=False):
            np.testing.assert_array_equal(got, kernels.linear(x, one))


@two_threads
@pytest.mark.parametrize("T", [1, 5, 20, 130])
def test_linear_is_bit_equal_on_one_and_two_threads(T):
    x, w = normal(T, 1100), stored(normal(333, 1100, seed=1), np.uint16)
    one = on_threads(1, lambda: kernels.linear(x, w))
    for _ in range(3):
        np.testing.assert_array_equal(on_threads(2, lambda: kernels.linear(x, w)), one)


# attend


def causal(T, S):
    return np.stack([np.zeros(T, int), np.arange(S - T, S) + 1], axis=1)


def ragged(T, S, seed=0):
    rng = np.random.default_rng(seed)
    lo = rng.integers(0, S + 1, T)
    return np.stack([lo, np.minimum(S, lo + rng.integers(0, 70, T))], axis=1)


def check_attend(q, k, v, **kwargs):
    got, want = kernels.attend(q, k, v, **kwargs), attention.attend(q, k, v, **kwargs)
    assert got.out.dtype == got.lse.dtype == np.float32
    np.testing.assert_allclose(got.lse, want.lse, rtol=1e-6, atol=3e-6)
    np.testing.assert_allclose(got.out, want.out, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("T", SIZES)
def test_attend_equals_numpy_at_awkward_sizes(T, n_threads):
    for S in SIZES:
        for K, G, D in ((2, 2, 16), (1, 3, 17), (3, 1, 65)):
            q, k, v = normal(K, G, T, D), normal(K, S, D, seed=1), normal(K, S, D, seed=2)
            check_attend(q, k, v, scale=D**-0.5)
            check_attend(q, k, v, scale=D**-0.5, log_weight_KS=normal(K, S, seed=3))
            check_attend(q, k, v, scale=D**-0.5, span_T2=ragged(T, S))
            if S >= T:
                check_attend(q, k, v, scale=D**-0.5, span_T2=causal(T, S))


@pytest.mark.parametrize(("K", "G", "T", "S", "D"), [(2, 7, 1, 3000, 64), (8, 2, 1, 1000, 128), (2, 2, 20, 5000, 80)])
def test_attend_equals_numpy_when_keys_are_split_into_chunks(K, G, T, S, D, n_threads):
    q, k, v = normal(K, G, T, D), normal(K, S, D, seed=1), normal(K, S, D, seed=2)
    check_attend(q, k, v, scale=D**-0.5)
    check_attend(q, k, v, scale=D**-0.5, log_weight_KS=normal(K, S, seed=3))
    check_attend(q, k, v, scale=D**-0.5, span_T2=causal(T, S))
    check_attend(q, k, v, scale=D**-0.5, span_T2=ragged(T, S))


def test_attend_equals_numpy_over_a_long_causal_prompt(n_threads):
    q, k, v = normal(2, 3, 500, 128), normal(2, 700, 128, seed=1), normal(2, 700, 128, seed=2)
    check_attend(q, k, v, scale=128**-0.5, span_T2=causal(500, 700))
    window = causal(500, 700)
    window[:, 0] = np.maximum(0, window[:, 1] - 100)
    check_attend(q, k, v, scale=128**-0.5, span_T2=window)


def test_attend_takes_values_of_another_width_than_keys():
    check_attend(normal(2, 2, 5, 16), normal(2, 30, 16, seed=1), normal(2, 30, 33, seed=2), scale=0.25)


def test_attend_reads_views_of_a_longer_cache():
    cache_k, cache_v = normal(3, 100, 32, seed=1), normal(3, 100, 32, seed=2)
    q = normal(3, 8, 2, 32).swapaxes(1, 2)
    check_attend(q, cache_k[:, 5:50], cache_v[:, 5:50], scale=0.2)


def test_attend_without_keys_gives_zero_and_minus_infinity():
    q = normal(2, 2, 3, 8)
    for S, span in ((0, None), (5, np.array([[0, 0], [5, 5], [4, 2]]))):
        out, lse = kernels.attend(q, normal(2, S, 8), normal(2, S, 8), scale=1.0, span_T2=span)
        assert (out == 0).all()
        assert np.isneginf(lse).all()
    masked = np.full((2, 5), -np.inf, np.float32)
    out, lse = kernels.attend(q, normal(2, 5, 8), normal(2, 5, 8), scale=1.0, log_weight_KS=masked)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("T", [3, 130])
def test_attend_never_reads_what_lies_outside_the_span(T):
    S = 600
    k, v = normal(2, S, 16, seed=1), normal(2, S, 16, seed=2)
    span = np.stack([np.arange(T), np.arange(T) + 200], axis=1)
    want = kernels.attend(normal(2, 2, T, 16), k, v, scale=0.3, span_T2=span)
    seen_by_one = T + 198
    k[:, T + 199 :], v[:, T + 199 :] = np.nan, np.inf
    k[:, seen_by_one], v[:, seen_by_one] = np.nan, np.nan
    got = kernels.attend(normal(2, 2, T, 16), k, v, scale=0.3, span_T2=span)
    np.testing.assert_array_equal(got.out[:, :, :-1], want.out[:, :, :-1])
    np.testing.assert_array_equal(got.lse[:, :, :-1], want.lse[:, :, :-1])
    assert np.isnan(got.out[:, :, -1]).all()
    assert np.isnan(got.lse[:, :, -1]).all()


@pytest.mark.parametrize("S", [3, 100, 2000])
@pytest.mark.parametrize("sign", [1, -1])
def test_attend_keeps_nan_of_a_query_a_key_and_a_weight(S, sign):
    nan = np.copysign(np.float32(np.nan), np.float32(sign))
    q, k, v, weight = normal(1, 1, 4, 8), normal(1, S, 8), normal(1, S, 8), np.full((1, S), -np.inf, np.float32)
    q[0, 0, 1, 2] = nan
    out, lse = kernels.attend(q, k, v, scale=1.0)
    assert np.isnan(out[0, 0, 1]).all()
    assert np.isnan(lse[0, 0, 1])
    assert np.isfinite(np.delete(out, 1, axis=2)).all()
    weight[0, S // 2] = nan
    out, lse = kernels.attend(q, k, v, scale=1.0, log_weight_KS=weight)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize(
    ("scores", "weights"),
    [
        ([90, 2, -2], [1, 0, 0]),
        ([-1e4, -9999, -2e4], [0.268941, 0.731059, 0]),
        ([1000, 1000, 999], [0.422319, 0.422319, 0.155362]),
    ],
)
def test_attend_survives_scores_beyond_the_range_of_exp(scores, weights):
    q, k = np.ones((1, 1, 1, 1), np.float32), np.array(scores, np.float32).reshape(1, 3, 1)
    out, lse = kernels.attend(q, k, np.eye(3, dtype=np.float32)[None], scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], weights, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(lse[0, 0, 0], np.logaddexp.reduce(np.array(scores, np.float64)), rtol=1e-6)


@two_threads
@pytest.mark.parametrize(("T", "S"), [(1, 3000), (20, 900), (300, 300)])
def test_attend_is_bit_equal_on_one_and_two_threads(T, S):
    q, k, v, span = normal(2, 7, T, 64), normal(2, S, 64, seed=1), normal(2, S, 64, seed=2), causal(T, S)
    one = on_threads(1, lambda: kernels.attend(q, k, v, scale=0.125, span_T2=span))
    for _ in range(3):
        two = on_threads(2, lambda: kernels.attend(q, k, v, scale=0.125, span_T2=span))
        np.testing.assert_array_equal(two.out, one.out)
        np.testing.assert_array_equal(two.lse, one.lse)


# norm, rope, swiglu


@pytest.mark.parametrize("E", SIZES[1:])
@pytest.mark.parametrize("T", SIZES)
def test_pointwise_kernels_equal_numpy_at_awkward_sizes(T, E, n_threads):
    x, y, w = normal(T, E), normal(T, E, seed=1), normal(E, seed=2)
    for got, want in (
        (kernels.rms_norm(x, w, 1e-6), layers.rms_norm(x, w, 1e-6)),
        (kernels.rms_norm(normal(3, T, E), w, 1e-6), layers.rms_norm(normal(3, T, E), w, 1e-6)),
        (kernels.swiglu(x * 20, y), layers.swiglu(x * 20, y)),
        (kernels.rope(normal(3, T, 2 * E), x, y), layers.rope(normal(3, T, 2 * E), x, y)),
    ):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-6)


@two_threads
def test_pointwise_kernels_are_bit_equal_on_one_and_two_threads():
    x, y, w, table = normal(300, 512), normal(300, 512, seed=1), normal(512, seed=2), normal(300, 256, seed=3)

    def run():
        return kernels.rms_norm(x, w, 1e-6), kernels.swiglu(x, y), kernels.rope(x[None], table, table)

    for one, two in zip(on_threads(1, run), on_threads(2, run), strict=True):
        np.testing.assert_array_equal(two, one)


def test_rms_norm_has_eps_inside_the_root():
    x = np.full((1, 4), 1e-3, np.float32)
    np.testing.assert_allclose(kernels.rms_norm(x, np.ones(4, np.float32), 1e-6), np.full((1, 4), 0.707107), rtol=1e-6)


def test_swiglu_is_right_where_exp_overflows():
    gate = np.array([[-100, -89, 100, 0, np.nan]], np.float32)
    got = kernels.swiglu(gate, np.ones_like(gate))
    np.testing.assert_allclose(got[0, :4], [0, 0, 100, 0], atol=1e-36)
    assert np.isnan(got[0, 4])


def test_exp_is_within_one_ulp():
    from npqwen.jit import jit
    from npqwen.kernels_simd import exp_row

    @jit(exact=True)
    def exp(x):
        exp_row(x, 0, len(x), np.float32(0))

    x = np.linspace(-87, 88, 300_001, dtype=np.float32)
    x[0] = 0
    want = np.exp(x.astype(np.float64))
    exp(x)
    assert (np.abs(x - want) <= np.spacing(want.astype(np.float32))).all()
    assert x[0] == 1
    edge = np.array([-np.inf, -1e30, np.nan], np.float32)
    exp(edge)
    assert (edge[:2] == 0).all()
    assert np.isnan(edge[2])


# threads, processes, caches


@two_threads
def test_threads_outside_the_machine_are_refused():
    with pytest.raises(ValueError, match="threads"):
        threads.set_threads(0)
    with pytest.raises(ValueError, match="threads"):
        threads.set_threads(threads.most() + 1)


def test_python_threads_may_use_kernels_at_once():
    x, w = normal(20, 256), stored(normal(500, 256, seed=1), np.uint16)
    q, k = normal(2, 4, 1, 64), normal(2, 2000, 64, seed=1)
    want = kernels.linear(x, w), kernels.attend(q, k, k, scale=0.1).out
    wrong = []

    def work():
        for _ in range(40):
            got = kernels.linear(x, w), kernels.attend(q, k, k, scale=0.1).out
            if not all(map(np.array_equal, got, want)):
                wrong.append(1)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    assert not wrong


def run_python(code, folder=PACKAGE.parent, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_forked_child_of_a_warm_parent_computes_the_same(layer):
    code = """
import os, sys, numpy as np
from npqwen import kernels
x, w = np.ones((1, 512), np.float32), np.full((4000, 512), 0x3F80, np.uint16)
want = kernels.linear(x, w)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(kernels.linear(x, w), want) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), np.array_equal(kernels.linear(x, w), want))
"""
    assert run_python(code, NUMBA_THREADING_LAYER=layer).split() == ["0", "True"]


SWIGLU = "import numpy as np; from npqwen.kernels import swiglu; print(swiglu(*np.ones((2, 1, 1), np.float32))[0, 0])"


def test_an_edited_helper_is_compiled_anew_although_kernels_are_cached(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "npqwen", ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    cache = str(tmp_path / "cache")
    assert run_python(SWIGLU, tmp_path, NUMBA_CACHE_DIR=cache).startswith("0.731")
    helper = tmp_path / "npqwen" / "kernels_simd.py"
    text = helper.read_text(encoding="utf-8")
    assert text.count("0x3F800000") == 1
    helper.write_text(text.replace("0x3F800000", "0x40000000"), encoding="utf-8")  # every power twice as large
    assert run_python(SWIGLU, tmp_path, NUMBA_CACHE_DIR=cache).startswith("0.576")  # 1 / (1 + 2/e)


def test_kernels_are_not_compiled_from_sources_of_two_states(tmp_path):
    """Born from a crash: processes that started between two edits ran, and kept, intrinsics called in their old meaning."""
    shutil.copytree(PACKAGE, tmp_path / "npqwen", ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    code = """
import pathlib, npqwen.jit
source = pathlib.Path("npqwen/kernels_simd.py")
source.write_text(source.read_text(encoding="utf-8").replace("0x3F800000", "0x40000000"), encoding="utf-8")
try:
    import npqwen.kernels
except ImportError as error:
    print(error)
"""
    cache = tmp_path / "cache"
    assert "kernels_simd.py was edited" in run_python(code, tmp_path, NUMBA_CACHE_DIR=str(cache))
    assert not list(cache.rglob("*.nb?"))


def test_compiled_code_is_stored_by_one_process_at_a_time(monkeypatch):
    from filelock import FileLock, Timeout

    from npqwen.jit import jit

    @jit()
    def twice(x):
        return x + x

    def save(key, data):
        folder = Path(twice._cache.cache_path).parent
        with pytest.raises(Timeout):
            FileLock(folder / "lock").acquire(timeout=0)
        saved.append(key)

    saved = []
    monkeypatch.setattr(twice._cache._cache_file, "save", save)
    assert twice(2) == 4
    assert len(saved) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_no_kernel_touches_memory_outside_its_arrays():
    run_python("import fenced; fenced.main(20)", Path(__file__).parent, PYTHONPATH=str(PACKAGE.parent))


def test_kernels_work_without_a_folder_for_their_cache(tmp_path):
    (tmp_path / "file").write_text("")
    assert run_python(SWIGLU, NUMBA_CACHE_DIR=str(tmp_path / "file")).startswith("0.731")


def test_importing_npqwen_does_not_import_numba():
    assert run_python("import sys, npqwen; print('numba' in sys.modules)").strip() == "False"
