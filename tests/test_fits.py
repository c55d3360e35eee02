"""What the fits are worth on the embedded model and one of the experiments' texts, and that threads change nothing."""

import numpy as np
import pytest

import kvmem
import npqwen
from experiments import protocol
from experiments.measure import prepare
from npqwen import layers, threads
from npqwen.attention import grouped

ARMS = ["centroid/8", "ffit/8", "frand/8", "sign:8", "lowrank16:64:8", "quest16:4", "exact:8", "sign:8+ffit/8"]


@pytest.fixture(scope="module")
def model():
    return npqwen.load("tiny")


@pytest.fixture(scope="module")
def subject(model):
    return prepare(model, protocol.load(protocol.path_of("e0")), text=1)


def fresh_queries(model, subject):
    """Per layer, queries of another text at positions after this one: no fit has seen them, their text or positions."""
    other = kvmem.read(model, subject.new_ids)
    positions = len(subject.reading) + np.arange(len(other))
    rotation = layers.rotation(model.config, positions)
    return [layers.rope(q, *rotation) for q in other.q]


def output_errors(model, subject, spec):
    """Per layer, the root mean square error of a part's output against exact attention over the same records."""
    memory, errors = kvmem.build(spec, subject.reading), []
    for layer, q in enumerate(fresh_queries(model, subject)):
        q_KGTD = grouped(q, model.config.n_kv_heads)
        exact = kvmem.build("full", subject.reading).parts[layer].state(q_KGTD)
        errors.append(np.sqrt(np.mean((memory.parts[layer].state(q_KGTD).out - exact.out) ** 2)))
    return np.array(errors)


@pytest.mark.parametrize(("f", "layers_lost"), [(16, 1), (8, 0), (4, 0)])
def test_fitted_values_beat_mean_values_on_fresh_queries_in_nearly_all_layers(model, subject, f, layers_lost):
    fitted, averaged = (output_errors(model, subject, f"{arm}/{f}") for arm in ("ffit", "centroid"))
    assert (fitted >= averaged).sum() <= layers_lost, (fitted / averaged).round(3)
    assert np.median(fitted / averaged) < 0.8


@pytest.mark.parametrize("spec", ARMS)
def test_one_thread_and_two_give_the_same_bits(model, subject, spec):
    if threads.most() < 2:
        pytest.skip("this process can use one thread only")
    outcomes = []
    before = threads.workers()
    for n in (1, 2):
        threads.set_threads(n)
        try:
            reading = kvmem.read(model, subject.reading.ids[:600])
            memory = kvmem.build(spec, reading, seed=1)
            states = [kvmem.attend(memory, layer, q[:, :64]) for layer, q in enumerate(fresh_queries(model, subject))]
            outcomes.append([array for state in states for array in state])
        finally:
            threads.set_threads(before)
    for one, two in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one, two)
