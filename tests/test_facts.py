from itertools import pairwise
from random import Random

import pytest

from experiments.facts import QUESTION, TEMPLATES, names, numbers, place, sentences, words

PROSE = "\n\n".join(
    " ".join(f"Sentence {chr(97 + i)} of part {chr(97 + j)} tells of 1850 boats. Was it so? It was." for i in range(20))
    for j in range(12)
)


def characters(text: str) -> list[int]:
    return list(text.encode())


def test_the_two_halves_share_no_word_but_every_syllable():
    training, experiment = set(words("training")), set(words("experiment"))
    assert not training & experiment
    assert len(training) > 2000
    assert len(experiment) > 2000
    assert {w[:2] for w in training} == {w[:2] for w in experiment}
    assert {w[2:] for w in training} == {w[2:] for w in experiment}


def test_an_unknown_half_is_an_error_that_names_both():
    with pytest.raises(ValueError, match="training, experiment"):
        words("other")


def test_no_word_occurs_in_two_names():
    drawn = [word for name in names("experiment", 500, Random(1)) for word in name.split()]
    assert len(drawn) == 1000 == len(set(drawn))


def test_names_keep_away_from_words_of_the_prose():
    first = names("experiment", 3, Random(5))
    again = names("experiment", 3, Random(5), avoid=first[1].upper())
    assert not {word for word in first[1].split()} & {word for name in again for word in name.split()}
    assert again[0] == first[0]


def test_more_names_than_words_is_an_error():
    with pytest.raises(ValueError, match="can be made"):
        names("experiment", 5000, Random(0))


def test_all_numbers_have_four_digits_and_none_comes_twice():
    drawn = numbers(9000, Random(0))
    assert sorted(drawn) == [str(i) for i in range(1000, 10000)]


def test_a_number_inside_any_run_of_digits_of_the_prose_is_not_drawn():
    drawn = numbers(9000 - 4, Random(0), avoid="in 1850, and 123456 more")
    assert not {"1850", "1234", "2345", "3456"} & set(drawn)
    assert len(drawn) == len(set(drawn)) == 8996


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    texts = [place(PROSE, 20, 6000, characters, Random(seed)) for seed in (3, 3, 4)]
    assert texts[0] == texts[1]
    assert texts[0].text != texts[2].text
    assert texts[0].facts != texts[2].facts


def test_every_number_and_every_word_of_a_name_occurs_once():
    made = place(PROSE, 20, 6000, characters, Random(0))
    assert len(made.facts) == 20
    for fact in made.facts:
        for part in (fact.number, fact.name, *fact.name.split(), fact.sentence):
            assert made.text.count(part) == 1
        assert fact.name in fact.question
        assert fact.number not in fact.question


def test_the_text_is_as_long_as_whole_sentences_allow():
    n_tokens = 6000
    made = place(PROSE, 20, n_tokens, characters, Random(0))
    longest = max(len(s) for s in sentences(PROSE))
    assert n_tokens - longest - 1 <= len(characters(made.text)) <= n_tokens
    bare = made.text
    for fact in made.facts:
        bare = bare.replace(" " + fact.sentence, "")
    assert bare == " ".join(sentences(PROSE))[: len(bare)]
    assert bare.endswith((".", "?"))


def test_no_text_starts_with_a_fact():
    for seed in range(20):
        assert place(PROSE, 20, 2500, characters, Random(seed)).text.startswith("Sentence a of part a")


def test_facts_lie_at_random_places_and_every_template_is_used_equally():
    made = place(PROSE, 20, 6000, characters, Random(0))
    order = [made.text.index(fact.sentence) for fact in made.facts]
    starts = sorted(order)
    assert len({b - a for a, b in pairwise(starts)}) > 5
    for sentence, _ in TEMPLATES:
        head = sentence.split("{name}")[0]
        tail = sentence.split("{number}")[1]
        n_used = sum(
            f.sentence.startswith(head)
            and f.sentence.endswith(tail)
            and f.sentence == sentence.format(name=f.name, number=f.number)
            for f in made.facts
        )
        assert n_used == 4


def test_in_every_template_the_name_comes_before_the_number():
    assert len(TEMPLATES) == 5
    for sentence, question in TEMPLATES:
        assert 0 <= sentence.index("{name}") < sentence.index("{number}")
        assert "{name}" in question
    assert QUESTION.format("x").endswith("Answer:")


def test_prose_that_is_too_short_is_an_error_not_a_shorter_text():
    with pytest.raises(ValueError, match="the prose has"):
        place("One sentence only. And a second one.", 2, 6000, characters, Random(0))


def test_facts_alone_that_fill_the_text_are_an_error():
    with pytest.raises(ValueError, match="no sentence of prose fits"):
        place(PROSE, 20, 300, characters, Random(0))
