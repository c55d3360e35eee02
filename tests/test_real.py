"""The same claims on real pretrained weights. NPQWEN_REAL_MODEL names the folder; `npqwen convert` can make one."""

import numpy as np
import pytest
import toy
from test_fits import output_errors

import kvmem
import npqwen
from experiments import measure, protocol
from npqwen import layers
from npqwen.model import block

pytestmark = pytest.mark.real

TEXT = (
    "A lighthouse marks a danger or a way in. Its lamp turns once in ten seconds, and ships far away see one flash.\n"
)
CODE = "def area(width: float, height: float) -> float:\n    return width * height\n"


@pytest.fixture(scope="module")
def reference(real_model):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("kernels", ["numba", "numpy"])
def test_logits_and_every_hidden_state_equal_transformers(real_model, reference, kernels):
    model = npqwen.load(real_model, kernels=kernels)
    ids = np.array(model.tokenizer.encode(TEXT * 4 + CODE * 2))
    want, want_hidden = toy.logits_and_hidden(reference, ids.tolist())
    worst = np.abs(npqwen.logits(model, ids) - want).max()
    print(
        f"\n{kernels}: {len(ids)} tokens, largest logit difference {worst:.2e}, largest logit {np.abs(want).max():.1f}"
    )
    assert worst <= 1e-4

    # Some channels of real hidden states reach thousands, where a float32 cannot hold 1e-4: there the bound is relative.
    def differs(got, want):
        return np.abs(got - want).max() / max(1.0, float(np.abs(want).max()))

    cache = model.new_cache([len(ids)])
    rotation = layers.rotation(model.config, cache.append([len(ids)]))
    x_TE = layers.embed(model.weights.embed, ids)
    for layer in range(model.config.n_layers):
        x_TE = block(model, layer, x_TE, rotation, cache.attend)
        if layer + 1 < model.config.n_layers:  # transformers gives the last one only after the final norm
            assert differs(x_TE, want_hidden[layer + 1]) <= 1e-4, f"after layer {layer}"
    assert differs(model.ops.rms_norm(x_TE, model.weights.norm, model.config.eps), want_hidden[-1]) <= 1e-4


def test_the_full_arm_is_plain_attention_and_recalls_what_none_does_not(real_model):
    model = npqwen.load(real_model)
    e2 = protocol.load(protocol.path_of("e2"))
    subject = measure.prepare(model, e2, 1)
    gap = measure.identity_gap(model, subject)
    print(f"\nidentity: {gap:.2e}")
    assert gap <= 1e-4
    recall = {}
    for arm in ("full", "none", "lowrank16:64:8"):
        memory = kvmem.build(arm, subject.reading, subject.seed, subject.settings)
        answers = kvmem.ask(model, memory, subject.questions)
        recall[arm] = sum(fact.number in answer for fact, answer in zip(subject.facts, answers, strict=True))
    print(recall)
    assert recall["full"] >= 12
    assert recall["none"] <= 1
    assert recall["lowrank16:64:8"] >= recall["full"] - 5


def test_fitted_values_beat_mean_values_on_fresh_queries_in_nearly_all_layers(real_model):
    model = npqwen.load(real_model)
    subject = measure.prepare(model, protocol.load(protocol.path_of("e0")), 1)
    for f, share_of_layers in ((16, 0.9), (8, 0.9), (4, 0.8)):
        ratio = output_errors(model, subject, f"ffit/{f}") / output_errors(model, subject, f"centroid/{f}")
        print(f"\n1/{f}: less error in {(ratio < 1).sum()} of {len(ratio)} layers, median ratio {np.median(ratio):.3f}")
        assert (ratio < 1).mean() >= share_of_layers
