import hashlib

import pytest

from experiments import protocol
from npqwen.errors import UserError

E1 = protocol.path_of("e1").read_text()


def load_changed(tmp_path, old, new):
    assert old in E1
    path = tmp_path / "protocol.toml"
    path.write_text(E1.replace(old, new, 1))
    return protocol.load(path)


@pytest.mark.parametrize(("name", "n_arms"), [("e0", 17), ("e1", 14), ("e2", 12)])
def test_every_experiment_has_its_protocol_in_toml_and_in_words(name, n_arms):
    loaded = protocol.load(protocol.path_of(name))
    assert loaded.name == name
    assert len(loaded.arms) == n_arms
    assert (loaded.n_texts, loaded.n_facts, loaded.n_tokens, loaded.max_new_tokens) == (6, 20, 2000, 8)
    assert (loaded.n_sinks, loaded.horizon, loaded.n_fit, loaded.ridge, loaded.check_limit) == (
        4,
        256,
        4096,
        1e-3,
        2e-4,
    )
    words = protocol.path_of(name).with_name("PROTOCOL.md").read_text()
    for part in ("Question", "Hypotheses", "Arms", "Measures", "Decision rule", "Statistics", "What would falsify it"):
        assert f"## {part}" in words


def test_e1_declares_the_function_at_an_eighth_against_none_for_both_selectors_and_both_k():
    family = protocol.load(protocol.path_of("e1")).families[0]
    assert family.measure == "recall"
    assert set(family.pairs) == {(f"{s}:{k}+ffit/8", f"{s}:{k}") for s in ("sign", "exact") for k in (8, 16)}


def test_the_long_texts_are_named_to_run_and_say_what_e2_says_but_for_their_length():
    assert protocol.standard() == ["e0", "e1", "e2"]
    assert protocol.names() == ["e0", "e1", "e2", "long16", "long8"]
    e2, *longs = (protocol.load(protocol.path_of(name)) for name in ("e2", "long8", "long16"))
    for one, n_tokens in zip(longs, (8000, 16000), strict=True):
        assert (one.n_tokens, one.n_texts, one.n_facts) == (n_tokens, 1, 20)
        for name in ("copy_tokens", "new_tokens", "n_sinks", "horizon", "n_fit", "ridge", "check_limit", "decision"):
            assert getattr(one, name) == getattr(e2, name)
        assert set(one.arms) < set(e2.arms)


def test_e0_has_every_kind_at_every_size():
    arms = protocol.load(protocol.path_of("e0")).arms
    kinds = ("recent", "centroid", "ffit", "frand", "random")
    assert set(arms) == {"full", "none"} | {f"{kind}/{f}" for kind in kinds for f in (16, 8, 4)}


def test_the_hash_is_that_of_the_bytes_and_changes_with_a_comment(tmp_path):
    assert protocol.load(protocol.path_of("e1")).sha256 == hashlib.sha256(E1.encode()).hexdigest()
    assert load_changed(tmp_path, "# greedy", "# greedy!").sha256 != hashlib.sha256(E1.encode()).hexdigest()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_facts = 20", "n_fact = 20", "unknown key 'n_fact'"),
        ("seed = 1\n", "", "missing key 'seed'"),
        ("alpha = 0.05", "alfa = 0.05", "unknown key 'alfa'"),
        ("margin = 0.10", "", "missing key 'margin'"),
        ("n_facts = 20", "n_facts = true", "n_facts is True"),
        ("n_facts = 20", "n_facts = 20.5", "n_facts is 20.5"),
        ("ridge = 1e-3", 'ridge = "small"', "ridge is 'small'"),
        ('"full", "none"', '"full"', "arms must hold 'none'"),
        ('"full", "none"', '"full", "none", "full"', "lists 'full' twice"),
        ('primary = "recall"', 'primary = "joy"', "unknown measure 'joy'"),
        ('["sign:8+ffit/8", "sign:8"]', '["sign:8+ffit/9", "sign:8"]', "compares 'sign:8+ffit/9'"),
        ('["sign:8+ffit/8", "sign:8"]', '["sign:8+ffit/8"]', "pairs is"),
        ("[decision]", "[decision", "not valid TOML"),
    ],
)
def test_a_protocol_with_a_slip_is_refused_in_one_line_that_names_it(tmp_path, old, new, message):
    with pytest.raises(UserError) as caught:
        load_changed(tmp_path, old, new)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_with_the_experiments_that_exist():
    with pytest.raises(UserError, match=r"no such protocol file.*e0, e1, e2"):
        protocol.load("nowhere/protocol.toml")


def test_a_protocol_cannot_be_changed_once_loaded():
    loaded = protocol.load(protocol.path_of("e1"))
    with pytest.raises(AttributeError):
        loaded.seed = 2  # type: ignore[misc]
