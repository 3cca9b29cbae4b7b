"""Advantages against the numbers of docs/algorithm.md for k = 2 of 8 and hand calculations."""

from __future__ import annotations

import pytest
import torch

from exgrpo_megatron.algorithm.advantages import group_advantages, informative_scale

TWO_OF_EIGHT = torch.tensor([[1.0, 1.0, 0, 0, 0, 0, 0, 0]])


def test_two_of_eight_correct_gives_plus_075_and_minus_025():
    assert group_advantages(TWO_OF_EIGHT).tolist() == [[0.75] * 2 + [-0.25] * 6]


def test_with_the_unbiased_deviation_two_of_eight_gives_16202_and_minus_05401():
    got = group_advantages(TWO_OF_EIGHT, normalize=True)
    torch.testing.assert_close(got, torch.tensor([[1.6202] * 2 + [-0.5401] * 6]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exactly_zero(reward: float, normalize: bool, leave_one_out: bool):
    rewards = torch.full((2, 7), reward)
    got = group_advantages(rewards, normalize=normalize, leave_one_out=leave_one_out)
    assert torch.equal(got, torch.zeros(2, 7))


def test_leave_one_out_compares_with_the_mean_of_the_others():
    """By hand: 1 - 1/7 = 6/7 for a correct one, 0 - 2/7 for a wrong one."""
    got = group_advantages(TWO_OF_EIGHT.double(), leave_one_out=True)
    torch.testing.assert_close(got, torch.tensor([[6 / 7] * 2 + [-2 / 7] * 6], dtype=torch.float64))


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert group_advantages(rewards).tolist() == [[0.5, -0.5], [0.0, 0.0], [-0.5, 0.5]]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2 members, found 1"):
        group_advantages(torch.ones(3, 1))


@pytest.mark.parametrize(
    ("rewards", "scale"),
    [
        # alpha = B / (B - M) of arXiv:2504.02546, M of B = 4 groups being all right or all wrong.
        ([[1, 0], [1, 1], [0, 0], [0, 0]], 4.0),
        ([[1, 0], [0, 1], [1, 1], [0, 0]], 2.0),
        ([[1, 0], [0, 1], [0.5, 0.25], [0, 1]], 1.0),
        ([[1, 1], [0, 0], [0.5, 0.5], [0, 0]], 1.0),
    ],
)
def test_the_scale_of_informative_groups_is_all_groups_over_those_that_differ(rewards: list, scale: float):
    assert informative_scale(torch.tensor(rewards, dtype=torch.float64)) == scale
