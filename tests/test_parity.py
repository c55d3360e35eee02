"""The forward pass against transformers (float32, eager): full logits and the hidden state after every layer."""

from contextlib import nullcontext

import numpy as np
import pytest
import toy

import npqwen
from npqwen import layers
from npqwen.model import block

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
GEOMETRIES = {
    "groups of 2": {},
    "groups of 1": {"num_attention_heads": 2},
    "groups of 3, D*H != E": {"num_attention_heads": 6, "head_dim": 10, "hidden_size": 34},
    "groups of 4": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "groups of 8, one kv head": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 53, "vocab_size": 101, "head_dim": 6, "num_hidden_layers": 5},
    "tied": {"tie_word_embeddings": True},
    "biases on q, k, v and o": {"attention_bias": True},
    "large eps": {"rms_norm_eps": 1e-2},
    "YaRN": {"rope_parameters": YARN, "head_dim": 16},
    "YaRN with its own temperature": {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0}},
    "sliding window in the upper layers": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "sliding window in listed layers": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "a window that is named but not used": {"sliding_window": 4},
    "Qwen3-0.6B's layers": QWEN3_06B,
    "Qwen3-1.7B's layers": QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen2": {"family": "qwen2"},
    "Qwen2 in groups of 7, tied": {
        "family": "qwen2",
        "num_attention_heads": 14,
        "head_dim": 8,
        "hidden_size": 112,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(scope="module", params=GEOMETRIES, ids=list(GEOMETRIES))
def pair(request, tmp_path_factory):
    """A transformers model and its folder."""
    changes = dict(GEOMETRIES[request.param])
    model = toy.build(changes.pop("family", "qwen3"), seed=len(request.param), **changes)
    return model, toy.save(model, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_logits_and_every_hidden_state_equal_transformers(pair, kernels):
    reference, folder = pair
    ids = np.random.default_rng(1).integers(0, reference.config.vocab_size, 45)
    want, want_hidden = toy.logits_and_hidden(reference, ids.tolist())

    with pytest.warns(UserWarning, match="YaRN") if "yarn" in str(reference.config.rope_parameters) else nullcontext():
        model = npqwen.load(folder, kernels=kernels)
    got = npqwen.logits(model, ids)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-4
    assert np.abs(want).max() > 1  # the comparison has something to compare

    cache = model.new_cache([len(ids)])
    positions = cache.append([len(ids)])
    x_TE = layers.embed(model.weights.embed, ids)
    rotation = layers.rotation(model.config, positions)
    for layer in range(model.config.n_layers):
        assert np.abs(x_TE - want_hidden[layer]).max() <= 1e-4, f"before layer {layer}"
        x_TE = block(model, layer, x_TE, rotation, cache.attend)
    x_TE = model.ops.rms_norm(x_TE, model.weights.norm, model.config.eps)
    assert np.abs(x_TE - want_hidden[-1]).max() <= 1e-4, "after the final norm"
