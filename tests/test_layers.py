"""The parts of a layer at values worked out by hand: pairing, order, eps, exp."""

import dataclasses

import numpy as np
import pytest

from npqwen import layers
from npqwen.config import Rope, parse_config

CONFIG = parse_config(
    {
        "model_type": "qwen3",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
)


def rotate(x, theta, position=1):
    config = dataclasses.replace(CONFIG, rope=Rope(theta))
    return layers.rope(np.array([[x]], np.float32), *layers.rotation(config, np.array([position])))[0, 0]


def test_rope_turns_channel_i_with_channel_i_plus_half():
    got = rotate([1, 2, 3, 4], 1e4)
    np.testing.assert_allclose(got, [-1.984111, 1.959901, 2.462378, 4.019800], atol=2e-6)


def test_norm_comes_before_rotation():
    gain = np.array([1, 2, 3, 4], np.float32)
    x = np.ones((1, 4), np.float32)
    got = rotate(layers.rms_norm(x, gain, 1e-6)[0], 1e6)
    np.testing.assert_allclose(got, [-1.984110, 1.995998, 2.462377, 4.001996], atol=2e-6)
    swapped = layers.rms_norm(rotate(x[0], 1e6)[None], gain, 1e-6)[0]
    np.testing.assert_allclose(swapped, [-0.301169, 1.997998, 4.145318, 4.003996], atol=2e-6)


def test_angles_are_exact_at_positions_that_bf16_does_not_have():
    cos, sin = layers.rotation(CONFIG, np.array([15962, 15936]))
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos[:, 0], [-0.908016, -0.267950], atol=1e-6)


def test_rope_is_undone_by_the_negative_angle():
    x = np.random.default_rng(0).standard_normal((2, 3, 4), np.float32)
    cos, sin = layers.rotation(CONFIG, np.array([5, 900, 40000]))
    np.testing.assert_allclose(layers.rope(layers.rope(x, cos, sin), cos, -sin), x, atol=1e-6)


def test_eps_stands_inside_the_root():
    got = layers.rms_norm(np.full((1, 4), 1e-3, np.float32), np.ones(4, np.float32), 1e-6)
    np.testing.assert_allclose(got, 0.707107, atol=1e-6)


def test_silu_neither_overflows_nor_warns():
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        got = layers.swiglu(np.array([[-100, -89, 100, 0, 1]], np.float32), np.ones((1, 5), np.float32))[0]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [0, 0, 100, 0, 0.731059], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_linear_takes_weights_as_stored_and_stays_float32(dtype):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 17), np.float32)
    w = rng.standard_normal((layers.TILE + 5, 17), np.float32)
    stored = layers.widen(w).astype(dtype) if dtype != np.uint16 else (w.view(np.uint32) >> 16).astype(np.uint16)
    got = layers.linear(x, stored)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x @ layers.widen(stored).T, rtol=0, atol=1e-5)
