"""The choice among stored answers, on an example on which every rule chooses another one."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.experience.selection import choose_answer, needs_scoring
from exgrpo_megatron.types import ScoredSequence


def scored(entropies: list[float], logprobs: list[float]) -> ScoredSequence:
    return ScoredSequence(np.array(logprobs, dtype=np.float32), np.array(entropies, dtype=np.float32))


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


@pytest.mark.parametrize("choice", [c for c in get_args(AnswerChoice) if c != "random"])
def test_the_first_of_equals_is_chosen(choice: AnswerChoice):
    assert choose_answer(choice, [ANSWERS[0], ANSWERS[0]], np.random.default_rng(0)) == 0


@pytest.mark.parametrize("choice", get_args(AnswerChoice))
def test_a_single_answer_needs_neither_scores_nor_chance(choice: AnswerChoice):
    rng, untouched = np.random.default_rng(0), np.random.default_rng(0)
    assert not needs_scoring(choice, 1)
    assert choose_answer(choice, [None], rng) == 0
    assert rng.random() == untouched.random()


def test_only_rules_that_look_at_scores_need_them():
    assert [c for c in get_args(AnswerChoice) if not needs_scoring(c, 2)] == ["random"]


def test_a_missing_or_broken_score_is_an_error():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="needs every stored answer scored"):
        choose_answer("lowest_mean_entropy", [ANSWERS[0], None], rng)
    with pytest.raises(ValueError, match="must be finite"):
        choose_answer("lowest_mean_entropy", [ANSWERS[0], scored([float("nan")], [-1.0])], rng)
    with pytest.raises(ValueError, match="no stored answer"):
        choose_answer("random", [], rng)
