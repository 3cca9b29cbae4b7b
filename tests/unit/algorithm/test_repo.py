"""The choices of RePO (arXiv:2506.09340) by hand, and that of most variance against trying every subset."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from exgrpo_megatron.algorithm.repo import choose_answers
from exgrpo_megatron.config import RepoChoice

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]  # oldest first


def chosen(choice: RepoChoice, rewards: list[float], num: int, seed: int = 0) -> list[int]:
    return choose_answers(choice, rewards, num, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("choice", "num", "indices"),
    [
        ("full_scope", 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("recent", 3, [5, 6, 7]),
        ("best_reward", 2, [0, 3]),
        ("best_reward", 5, [0, 1, 2, 3, 6]),  # all right ones, then the oldest wrong ones
        ("symmetric", 4, [0, 3, 5, 7]),
        ("symmetric", 3, [0, 3, 7]),
        ("variance", 4, [0, 3, 5, 7]),  # two of each
        ("variance", 5, [0, 3, 5, 6, 7]),  # 3 : 2 varies as 2 : 3 does, and has the higher sum
        ("variance", 7, [0, 2, 3, 4, 5, 6, 7]),  # 3 : 4 is all there is
        ("recent", 9, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_choices_by_hand(choice: RepoChoice, num: int, indices: list[int]):
    assert chosen(choice, REWARDS, num) == indices


def test_a_random_choice_is_of_distinct_answers_and_each_is_as_likely():
    counts = np.zeros(8)
    for seed in range(2000):
        picked = chosen("random", REWARDS, 3, seed)
        assert len(set(picked)) == 3
        counts[picked] += 1
    # 750 each, with a deviation of root(2000 x 3/8 x 5/8) = 22.
    assert np.abs(counts - 750).max() < 4 * 22


@pytest.mark.parametrize("seed", range(20))
def test_no_other_subset_varies_more(seed: int):
    rng = np.random.default_rng(seed)
    rewards = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0, -1.0], size=9).tolist()
    num = int(rng.integers(2, 9))
    scores = [
        (round(float(np.var(subset)), 12), round(float(np.sum(subset)), 12)) for subset in combinations(rewards, num)
    ]
    picked = [rewards[index] for index in chosen("variance", rewards, num)]
    assert (round(float(np.var(picked)), 12), round(float(np.sum(picked)), 12)) == max(scores)
