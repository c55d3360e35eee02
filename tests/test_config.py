"""config.json: both spellings, no silent default, and refusals that name what was found."""

import numpy as np
import pytest

from npqwen.config import Rope, parse_config
from npqwen.errors import UserError

BASE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def with_keys(**changes):
    return {key: value for key, value in (BASE | changes).items() if value is not ...}


def test_head_dim_is_its_own_number():
    config = parse_config(BASE)
    assert config.head_dim == 8
    assert config.n_heads * config.head_dim == 32 != config.hidden
    assert parse_config(with_keys(head_dim=128)).scale == pytest.approx(0.0883883, abs=1e-7)


@pytest.mark.parametrize("absent", [..., None])
def test_an_absent_head_dim_is_what_the_family_assumes(absent):
    assert parse_config(with_keys(head_dim=absent)).head_dim == 128
    assert parse_config(with_keys(head_dim=absent, model_type="qwen2")).head_dim == 6


def test_both_spellings_of_the_rope_settings_are_the_same_config():
    old = with_keys(rope_theta=1e6, rope_scaling=None)
    new = with_keys(rope_theta=..., rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    assert parse_config(old) == parse_config(new)
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = with_keys(rope_scaling={"type": "yarn"} | scaled)
    new = with_keys(rope_theta=..., rope_parameters={"rope_theta": 1e6, "rope_type": "yarn"} | scaled)
    assert parse_config(old) == parse_config(new)


def test_no_theta_is_refused_and_not_guessed():
    with pytest.raises(UserError, match=r"rope_theta is None.*no default"):
        parse_config(with_keys(rope_theta=...))


def test_two_spellings_that_disagree_are_refused():
    with pytest.raises(UserError, match=r"rope_theta is 1000000.0 in one place and 10000.0"):
        parse_config(with_keys(rope_parameters={"rope_theta": 1e4}))


@pytest.mark.parametrize(("theta", "last"), [(1e6, 1.24094e-6), (5e6, 2.54508e-7), (1e4, 1.15478e-4)])
def test_the_last_inverse_frequency_at_head_dim_128(theta, last):
    assert Rope(theta).inv_freq(128)[-1] == pytest.approx(last, rel=1e-5)


def test_yarn_scales_by_its_own_factor_and_not_by_the_ratio_of_lengths():
    rope = parse_config(
        with_keys(
            max_position_embeddings=40960,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        )
    ).rope
    plain, scaled = Rope(1e6).inv_freq(128), rope.inv_freq(128)
    assert rope.attention_factor == pytest.approx(1.138629, abs=1e-6)
    np.testing.assert_array_equal(scaled[:24], plain[:24])
    np.testing.assert_allclose(scaled[[24, 39, 40]], [5.37532e-3, 6.49039e-5, 4.44570e-5], rtol=1e-5)
    np.testing.assert_allclose(scaled[40:], plain[40:] / 4, rtol=1e-12)


def test_a_sliding_window_passes_two_gates():
    full = (None,) * 5
    assert parse_config(with_keys(sliding_window=4)).windows == full
    gated = with_keys(sliding_window=4, use_sliding_window=True, max_window_layers=3)
    assert parse_config(gated).windows == (None, None, None, 4, 4)
    kinds = ["sliding_attention", "full_attention", "full_attention", "full_attention", "sliding_attention"]
    assert parse_config(gated | {"layer_types": kinds}).windows == (4, None, None, None, 4)
    with pytest.raises(UserError, match="layer_types lists 4 layers, num_hidden_layers is 5"):
        parse_config(gated | {"layer_types": kinds[:4]})
    with pytest.raises(UserError, match="'linear_attention' is not implemented"):
        parse_config(gated | {"layer_types": ["linear_attention", *kinds[1:]]})
    with pytest.raises(UserError, match="sliding_window is None"):
        parse_config(with_keys(sliding_window=None, layer_types=kinds))


@pytest.mark.parametrize("dtype_key", ["torch_dtype", "dtype"])
def test_the_dtype_key_under_either_name_changes_nothing(dtype_key):
    assert parse_config(with_keys(**{dtype_key: "float16"})) == parse_config(BASE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen3_moe"}, r"model_type 'qwen3_moe' is not implemented \(qwen3, qwen2\)"),
        ({"model_type": "qwen3_5"}, "model_type 'qwen3_5'"),
        ({"model_type": ...}, "model_type None"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised checkpoint \(awq\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_type 'longrope' is not implemented \(default, yarn\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
        (
            {"partial": ..., "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"num_attention_heads": 5}, "5 query heads cannot share 2"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": 8.0}, "head_dim is 8.0"),
        ({"vocab_size": ...}, "vocab_size is None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"eos_token_id": "151645"}, "eos_token_id '151645' is not an id or a list of ids"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, says):
    with pytest.raises(UserError, match=says):
        parse_config(with_keys(**changes))


def test_end_ids_are_read_as_a_number_a_list_or_nothing():
    assert parse_config(with_keys(eos_token_id=5)).eos_ids == (5,)
    assert parse_config(with_keys(eos_token_id=[5, 6])).eos_ids == (5, 6)
    assert parse_config(with_keys(eos_token_id=None)).eos_ids == ()
