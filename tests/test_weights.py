"""safetensors files: every format detail that a reader gets wrong silently, and every file that is none."""

import json
import tracemalloc

import numpy as np
import pytest
import toy
from safetensors.numpy import save_file

import npqwen
from npqwen.errors import UserError
from npqwen.weights import narrow, read_safetensors, widen


def raw_file(path, tensors, pad=0, metadata=None, order=None):
    """A safetensors file by hand: tensors name -> (dtype, shape, bytes), JSON keys in `order`, header padded by blanks."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    header = {"__metadata__": metadata} if metadata else {}
    header |= {name: entries[name] for name in order or entries}
    text = json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_bf16_words_are_the_upper_half_of_a_float32():
    words = np.array([0x3F80, 0x4049, 0xC000, 0x3DCD, 0x0001, 0x7F80, 0x8000], np.uint16)
    got = widen(words)
    want = np.array([1.0, 3.140625, -2.0, 0.10009765625, 9.183549615799121e-41, np.inf, -0.0], np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    assert np.signbit(got[-1])


def test_narrowing_rounds_to_nearest_even_and_keeps_nan():
    got = narrow(np.array([1.00390625, 1.01171875, -2.0, np.inf, np.nan], np.float32))
    assert got[:4].tolist() == [0x3F80, 0x3F82, 0xC000, 0x7F80]
    assert np.isnan(widen(got[4:]))[0]


def test_every_dtype_scalars_and_empty_tensors_are_read(tmp_path):
    arrays = {
        "f16": np.array([1.5, -2], np.float16),
        "f32": np.array([[1.5], [2.5]], np.float32),
        "f64": np.array([3.25]),
        "i64": np.array([-7]),
        "u8": np.array([1, 2, 3], np.uint8),
        "flag": np.array([True, False]),
        "scalar": np.array(4.0, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(arrays, tmp_path / "a.safetensors")
    got = read_safetensors(tmp_path / "a.safetensors")
    for name, want in arrays.items():
        np.testing.assert_array_equal(got[name][1], want)
        assert got[name][1].shape == want.shape


@pytest.mark.parametrize("pad", range(8))
def test_data_may_start_anywhere_and_come_in_any_order(tmp_path, pad):
    x, y = np.arange(6, dtype=np.float32), np.array([0x3F80, 0x4049], np.uint16)
    tensors = {
        "odd": ("U8", [3], b"abc"),
        "x": ("F32", [2, 3], x.tobytes()),
        "y": ("BF16", [2], y.tobytes()),
    }
    path = raw_file(tmp_path / "a.safetensors", tensors, pad, {"format": "pt"}, order=["y", "odd", "x"])
    got = read_safetensors(path)
    assert list(got) == ["y", "odd", "x"]
    np.testing.assert_array_equal(got["x"][1], x.reshape(2, 3))
    np.testing.assert_array_equal(got["y"][1], y)
    assert all(array.flags.aligned for _, array in got.values())
    assert not any(array.flags.writeable for _, array in got.values())


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (POINTER, "git-lfs pointer"),
        (b"", "0 bytes"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        ((2_336_927_755_350_992_246).to_bytes(8, "little") + b"{}", "asks for 2336927755350992254"),
        (b"\x02\0\0\0\0\0\0\0{]", "not whole safetensors"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused_in_one_line_and_little_memory(tmp_path, content, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=says) as caught:
        read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_cut_by_one_byte_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(8, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="partial download"):
        read_safetensors(path)


def test_a_genuine_header_beyond_the_librarys_limit_is_told_from_a_damaged_file(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((130_000_000).to_bytes(8, "little"))
        file.truncate(130_000_100)  # a hole on disk, not 130 MB
    with pytest.raises(
        UserError, match=r"header has 130,000,000 bytes; the safetensors library reads up to 100,000,000"
    ):
        read_safetensors(path)


def test_a_dtype_that_numpy_cannot_hold_is_named(tmp_path):
    path = raw_file(tmp_path / "a.safetensors", {"x": ("F8_E4M3", [4], b"abcd")})
    with pytest.raises(UserError, match="tensor x is F8_E4M3"):
        read_safetensors(path)


@pytest.fixture
def folder(tmp_path):
    return toy.save(toy.build(), tmp_path)


def tensors_of(folder):
    return {name: np.array(array) for name, (_, array) in read_safetensors(folder / "model.safetensors").items()}


def shard(folder, tensors, where):
    """Splits tensors over the files that `where` names, with an index."""
    (folder / "model.safetensors").unlink()
    for name in sorted(set(where.values())):
        save_file({key: tensors[key] for key in tensors if where[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


IDS = [3, 14, 15, 92, 65]


def test_shards_and_prefixes_give_the_same_logits(folder):
    want = npqwen.logits(npqwen.load(folder, kernels="numpy"), IDS)
    tensors = tensors_of(folder)
    bare = {name.removeprefix("model."): array for name, array in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    np.testing.assert_array_equal(npqwen.logits(npqwen.load(folder, kernels="numpy"), IDS), want)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    shard(folder, tensors, where)
    np.testing.assert_array_equal(npqwen.logits(npqwen.load(folder, kernels="numpy"), IDS), want)


def test_both_spellings_of_one_tensor_are_refused(folder):
    tensors = tensors_of(folder)
    save_file(tensors | {"norm.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"norm\.weight is present twice"):
        npqwen.load(folder, kernels="numpy")


def test_missing_shards_and_tensors_are_named_before_anything_is_computed(folder):
    tensors = tensors_of(folder)
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    shard(folder, tensors, where)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"shards missing: model-00002-of-00002.safetensors \(\d+ tensors"):
        npqwen.load(folder, kernels="numpy")


def test_a_tensor_that_is_not_in_its_shard_is_named(folder):
    tensors = tensors_of(folder)
    where = dict.fromkeys(tensors, "a.safetensors")
    shard(folder, tensors, where)
    save_file({n: a for n, a in tensors.items() if n != "model.norm.weight"}, folder / "a.safetensors")
    with pytest.raises(UserError, match=r"index places here are missing: model\.norm\.weight"):
        npqwen.load(folder, kernels="numpy")


def test_a_stray_file_beside_indexed_shards_is_not_merged(folder):
    want = npqwen.logits(npqwen.load(folder, kernels="numpy"), IDS)
    tensors = tensors_of(folder)
    shard(folder, tensors, dict.fromkeys(tensors, "a.safetensors"))
    save_file({name: array * 0 for name, array in tensors.items()}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"not read: model\.safetensors"):
        model = npqwen.load(folder, kernels="numpy")
    np.testing.assert_array_equal(npqwen.logits(model, IDS), want)


def test_two_files_without_an_index_are_refused(folder):
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file(tensors, folder / "b.safetensors")
    with pytest.raises(
        UserError, match=r"several \(a.safetensors, b.safetensors\) and no model.safetensors.index.json"
    ):
        npqwen.load(folder, kernels="numpy")


def test_unused_tensors_are_warned_about_by_name(folder):
    save_file(tensors_of(folder) | {"model.extra.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"not used: model.extra.weight"):
        npqwen.load(folder, kernels="numpy")


def test_a_missing_tensor_and_a_wrong_shape_are_named_with_both_shapes(folder):
    tensors = tensors_of(folder)
    lacking = {name: array for name, array in tensors.items() if "layers.1.mlp.up" not in name}
    save_file(lacking, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        npqwen.load(folder, kernels="numpy")
    config = json.loads((folder / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "head_dim"}))
    with pytest.raises(
        UserError, match=r"q_proj.weight has shape \(32, 24\), config.json implies \(512, 24\) \(head_dim 128"
    ):
        npqwen.load(folder, kernels="numpy")


def test_a_qwen2_checkpoint_under_a_qwen3_config_is_not_accepted(tmp_path):
    folder = toy.save(toy.build("qwen2", head_dim=6), tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3", "head_dim": 6}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"q_norm.weight is missing \(model_type qwen3 needs it\)"):
        npqwen.load(folder, kernels="numpy")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_give_exactly_what_their_float32_copy_gives(tmp_path, dtype):
    import torch

    half = toy.build().to(getattr(torch, dtype))
    model = npqwen.load(toy.save(half, tmp_path / "half"), kernels="numpy")
    assert model.weights.layers[0].q.dtype == (np.uint16 if dtype == "bfloat16" else np.float16)
    wide = npqwen.load(toy.save(half.float(), tmp_path / "wide"), kernels="numpy")
    np.testing.assert_allclose(npqwen.logits(model, IDS), npqwen.logits(wide, IDS), rtol=0, atol=1e-5)
