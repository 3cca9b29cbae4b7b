"""Advantages against the numbers of docs/algorithm.md for k = 2 of 8 and hand calculations."""

from __future__ import annotations

import math
import statistics

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


@pytest.mark.parametrize(
    ("correct", "of_correct", "of_wrong"),
    [
        # By hand, of eight, with NeMo-RL's 1e-6 on the deviation. One correct: the others of it are all 0, so that its
        # 1 - 0 is not divided; a wrong one sees 1 in 7: mean 1/7, deviation root((1/7 - 1/49) 7/6) = root(1/7).
        (1, 1.0, -(1 / 7) / (math.sqrt(1 / 7) + 1e-6)),
        # Two: 1 in 7 and 2 in 7, deviations root(1/7) and root((2/7 - 4/49) 7/6) = root(5/21).
        (2, (6 / 7) / (math.sqrt(1 / 7) + 1e-6), -(2 / 7) / (math.sqrt(5 / 21) + 1e-6)),
        # Seven mirror one.
        (7, (1 / 7) / (math.sqrt(1 / 7) + 1e-6), -1.0),
    ],
)
def test_leave_one_out_divides_by_the_deviation_of_the_others(correct: int, of_correct: float, of_wrong: float):
    rewards = torch.tensor([[1.0] * correct + [0.0] * (8 - correct)], dtype=torch.float64)
    got = group_advantages(rewards, normalize=True, leave_one_out=True)
    want = torch.tensor([[of_correct] * correct + [of_wrong] * (8 - correct)], dtype=torch.float64)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_of_two_members_leave_one_out_has_no_deviation_to_divide_by():
    """The one other has none: NeMo-RL takes its undefined deviation as 0, and divides by no 0."""
    got = group_advantages(torch.tensor([[1.0, 0.0], [0.25, 1.0]]), normalize=True, leave_one_out=True)
    assert got.tolist() == [[1.0, -1.0], [-0.75, 0.75]]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_advantages_of_any_rewards_are_those_of_pythons_statistics(normalize: bool, leave_one_out: bool):
    rewards = torch.rand(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    rewards[0] = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.7])  # equal ones whose rounded mean is not theirs
    got = group_advantages(rewards, normalize=normalize, leave_one_out=leave_one_out)
    for group, advantages in zip(rewards.tolist(), got.tolist(), strict=True):
        for member, advantage in enumerate(advantages):
            compared = group[:member] + group[member + 1 :] if leave_one_out else group
            deviation = statistics.stdev(compared)
            divisor = deviation + 1e-6 if normalize and deviation else 1.0
            assert advantage == pytest.approx((group[member] - statistics.mean(compared)) / divisor, abs=1e-12)


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
