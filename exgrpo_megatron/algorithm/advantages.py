"""From rewards of a group to advantages."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def group_advantages(
    rewards: Float[Tensor, "groups members"], *, normalize: bool = False, leave_one_out: bool = False
) -> Float[Tensor, "groups members"]:
    """Reward minus the baseline of its group; exactly 0 where all rewards of a group are equal.

    Args:
        rewards: one group a row, the replayed member included.
        normalize: divide by the group's unbiased standard deviation (GRPO); off, this is Dr.GRPO (arXiv:2503.20783).
        leave_one_out: the baseline is the mean of the other members instead of the mean of all.

    Raises:
        ValueError: a group has fewer than two members, so that there is nothing to compare a reward with.
    """
    members = rewards.shape[1]
    if members < 2:
        raise ValueError(f"a group needs at least 2 members, found {members}")
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if leave_one_out:
        advantages = advantages * (members / (members - 1))
    if normalize:
        advantages = advantages / rewards.std(dim=1, keepdim=True, unbiased=True)
    # Equal rewards may differ from their own rounded mean by an ulp, which the division would blow up to order 1.
    all_equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(advantages), advantages)


def informative_scale(rewards: Float[Tensor, "groups members"]) -> float:
    """Groups over groups whose rewards differ: alpha = B / (B - M) of GPG (arXiv:2504.02546), M of B groups having no
    advantage. 1 where no group has one, as there is nothing to scale."""
    differing = int((rewards.amax(dim=1) > rewards.amin(dim=1)).sum())
    return len(rewards) / differing if differing else 1.0
