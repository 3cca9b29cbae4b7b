"""The embedded task with hidden meanings."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from exgrpo_megatron.data.generated import is_held_out
from exgrpo_megatron.data.questions import load_questions
from exgrpo_megatron.data.unknown_symbols import BELIEVED, LETTERS, SHIFTS, generate, meanings, prior
from exgrpo_megatron.errors import DataError

SYMBOLS = {"generator": "unknown_symbols"}


def test_the_answer_is_every_partial_result_under_the_hidden_meanings():
    hidden = meanings(3)
    for question in generate(300, 7, (1, 2, 3), meanings=hidden, held_out=False):
        value, results = int(question.text[0]), []
        for letter in question.text[1:]:
            value = (value + SHIFTS[hidden[letter]]) % 10
            results.append(str(value))
        assert question.answer == "".join(results)
        assert question.worked.endswith(f"\n\\boxed{{{question.answer}}}")
        assert question.num_letters == len(results)


def test_no_wrong_reading_is_right_by_luck():
    # Shifts that differ modulo 10 give partial results that differ.
    assert len({amount % 10 for amount in SHIFTS.values()}) == len(SHIFTS)


def test_other_meanings_change_the_answers_only():
    one, other = (generate(50, 0, (2,), meanings=meanings(seed), held_out=False) for seed in (0, 1))
    assert [question.text for question in one] == [question.text for question in other]
    assert [question.answer for question in one] != [question.answer for question in other]


def test_the_prior_holds_every_true_meaning_for_8_to_25_percent_likely_and_never_changes():
    believed = prior()
    assert sum(BELIEVED) == pytest.approx(1)
    assert all(
        row.keys() == SHIFTS.keys() and sorted(row.values(), reverse=True) == list(BELIEVED)
        for row in believed.values()
    )
    assert len({tuple(row) for row in believed.values()}) > 6
    chances = [believed[letter][shift] for seed in range(20) for letter, shift in meanings(seed).items()]
    assert min(chances) >= 0.08
    assert max(chances) <= 0.25
    # Two letters: a start pass rate of 2 to 3%.
    assert 0.02 < (sum(chances) / len(chances)) ** 2 < 0.03
    # Python keeps these draws from one version to the next; warm starts that are kept depend on it.
    assert "".join(believed["a"]) == "DEFCAB"
    assert "".join(meanings(0)[letter] for letter in LETTERS) == "EDEBCDFEEBBC"


def test_meanings_differ_between_seeds():
    assert len({tuple(meanings(seed).values()) for seed in range(20)}) == 20


def test_training_and_held_out_questions_share_none_whatever_their_seeds():
    sides = [
        {
            question.text
            for seed in range(3)
            for question in generate(200, seed, (2,), meanings=meanings(0), held_out=side)
        }
        for side in (False, True)
    ]
    assert not sides[0] & sides[1]
    # Of the 1440 questions of two letters about a fifth.
    every = [f"{digit}{first}{second}" for digit in range(10) for first in LETTERS for second in LETTERS]
    assert sum(map(is_held_out, every)) / len(every) == pytest.approx(0.2, abs=0.03)


def test_more_questions_than_there_are_quotes_the_numbers():
    with pytest.raises(DataError, match=r"generator_size = 200 with .* = \[1\] asks for more questions of 1 letters"):
        generate(200, 0, (1,), meanings=meanings(0), held_out=False)


def test_a_recipe_chooses_sizes_difficulties_and_meanings(make_recipe, symbols_tokenizer):
    source = {**SYMBOLS, "generator_size": 30, "generator_difficulties": [1, 2, 3], "generator_meaning_seed": 4}
    config = make_recipe(source)
    loaded = load_questions(config.data.train, config.data, symbols_tokenizer, held_out=False)
    assert Counter(question.category for question in loaded.questions) == {"1": 10, "2": 10, "3": 10}
    expected = generate(30, 0, (1, 2, 3), meanings=meanings(4), held_out=False)
    assert [(q.text, q.answer) for q in loaded.questions] == [(q.text, q.answer) for q in expected]
    assert make_recipe(SYMBOLS).data.train.difficulties == (2,)


@pytest.mark.parametrize(
    ("train", "validation", "said"),
    [
        ({**SYMBOLS, "generator_difficulties": [4]}, None, r"\[4\]: unknown_symbols has 1 to 3"),
        ({"generator": "chain_arithmetic", "generator_difficulties": [1]}, None, r"chain_arithmetic has 2 to 8"),
        ({"generator": "chain_arithmetic", "generator_meaning_seed": 1}, None, r"meaning_seed = 1 has no effect"),
        ({"path": "q.jsonl", "generator_meaning_seed": 1}, None, r"meaning_seed = 1 has no effect"),
        (SYMBOLS, {**SYMBOLS, "generator_meaning_seed": 1}, r"train\.generator_meaning_seed = 0, but validation"),
    ],
)
def test_what_does_not_fit_is_refused(make_recipe, train, validation, said):
    with pytest.raises(ValidationError, match=said):
        make_recipe(train, validation=validation)
