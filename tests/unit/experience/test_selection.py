"""The choice among stored answers, on an example on which every rule chooses another one."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.experience.selection import choose_answer, mean_agreement, needs_scoring, needs_tokens, within
from exgrpo_megatron.types import ScoredSequence


def scored(entropies: list[float], logprobs: list[float]) -> ScoredSequence:
    return ScoredSequence(np.array(logprobs, dtype=np.float32), np.array(entropies, dtype=np.float32))


def tokens(*answers: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(answer, np.int32) for answer in answers]


# Mean entropy 0.9 / 0.5 / 0.6, total 0.9 / 2.0 / 1.2, mean log-prob -1.0 / -1.0 / -0.2.
ANSWERS = [scored([0.9], [-1.0]), scored([0.5] * 4, [-1.0] * 4), scored([0.7, 0.5], [-0.1, -0.3])]


@pytest.mark.parametrize(
    ("choice", "index"), [("lowest_total_entropy", 0), ("lowest_mean_entropy", 1), ("lowest_perplexity", 2)]
)
def test_each_rule_chooses_its_own_answer(choice: AnswerChoice, index: int):
    assert choose_answer(choice, ANSWERS, np.random.default_rng(0)) == index


def test_random_chooses_alike_and_needs_no_scores():
    rng = np.random.default_rng(0)
    draws = 3000
    counts = np.bincount([choose_answer("random", [None, None, None], rng) for _ in range(draws)])
    assert np.abs(counts / draws - 1 / 3).max() <= 4 * (2 / 9 / draws) ** 0.5


@pytest.mark.parametrize("choice", [c for c in get_args(AnswerChoice) if c not in ("random", "newest")])
def test_the_first_of_equals_is_chosen(choice: AnswerChoice):
    assert choose_answer(choice, [ANSWERS[0]] * 2, np.random.default_rng(0), tokens([1, 2], [1, 2])) == 0


@pytest.mark.parametrize("choice", get_args(AnswerChoice))
def test_a_single_answer_needs_neither_scores_nor_chance(choice: AnswerChoice):
    rng, untouched = np.random.default_rng(0), np.random.default_rng(0)
    assert not needs_scoring(choice, 1)
    assert choose_answer(choice, [None], rng) == 0
    assert rng.random() == untouched.random()


def test_only_rules_that_look_at_scores_need_them():
    assert [c for c in get_args(AnswerChoice) if not needs_scoring(c, 2)] == [
        "random", "shortest", "newest", "agreement",
    ]  # fmt: skip
    assert [c for c in get_args(AnswerChoice) if needs_tokens(c, 2)] == ["shortest", "agreement"]
    assert not any(needs_tokens(c, 1) for c in get_args(AnswerChoice))


def test_a_missing_or_broken_score_is_an_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="needs every stored answer scored"):
        choose_answer("lowest_mean_entropy", [ANSWERS[0], None], rng)
    with pytest.raises(ValueError, match="must be finite"):
        choose_answer("lowest_mean_entropy", [ANSWERS[0], scored([float("nan")], [-1.0])], rng)
    with pytest.raises(ValueError, match="no stored answer"):
        choose_answer("random", [], rng)
    with pytest.raises(ValueError, match="shortest needs the token ids of 2 stored answers, found those of 1"):
        choose_answer("shortest", [None, None], rng, tokens([1]))


FOUR = tokens([1, 2, 3, 4], [1, 2, 3], [5, 2, 3], [7, 8])


@pytest.mark.parametrize(("choice", "index"), [("shortest", 3), ("newest", 3), ("agreement", 1)])
def test_rules_of_tokens_and_age_need_no_scores(choice: AnswerChoice, index: int):
    assert choose_answer(choice, [None] * 4, np.random.default_rng(0), FOUR) == index


def test_agreement_is_the_share_of_neighbouring_pairs_in_common():
    """By hand: 12 23 34 | 12 23 | 52 23 | 78: of the first two 2 of 3, first and third 1 of 4, second and third 1 of 3;
    the last has nothing in common with any. Means over the three others."""
    expected = np.array([2 / 3 + 1 / 4, 2 / 3 + 1 / 3, 1 / 4 + 1 / 3, 0]) / 3
    np.testing.assert_allclose(mean_agreement(FOUR), expected)
    assert mean_agreement(tokens([1], [1])).tolist() == [0, 0]


def test_candidates_are_those_within_the_limit_or_the_one_below_all_others():
    entropies = np.array([0.3, 0.1, 0.2], np.float32)
    assert within(entropies, 0.2) == [1, 2]
    assert within(entropies, 0.05) == [1]
