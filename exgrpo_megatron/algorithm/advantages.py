"""From rewards of a group to advantages."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Added to a deviation before it divides, as in NeMo-RL and verl: changes an advantage by some millionths.
DEVIATION_EPSILON = 1e-6


def group_advantages(
    rewards: Float[Tensor, "groups members"], *, normalize: bool = False, leave_one_out: bool = False
) -> Float[Tensor, "groups members"]:
    """Reward minus the baseline of its group; exactly 0 where all rewards of a group are equal.

    Args:
        rewards: one group a row, the replayed member included.
        normalize: divide by the group's unbiased standard deviation (GRPO); off, this is Dr.GRPO (arXiv:2503.20783).
        leave_one_out: the baseline is the mean of the other members instead of the mean of all. With `normalize` the
            deviation too is that of the others, as in NeMo-RL, and a member whose others are all equal is not divided.

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
        compared = _others(rewards) if leave_one_out else rewards.unsqueeze(1)
        advantages = advantages / _divisors(compared)
    return torch.where(_all_equal(rewards), torch.zeros_like(advantages), advantages)


def informative_scale(rewards: Float[Tensor, "groups members"]) -> float:
    """Groups over groups whose rewards differ: alpha = B / (B - M) of GPG (arXiv:2504.02546), M of B groups having no
    advantage. 1 where no group has one, as there is nothing to scale."""
    differing = int((~_all_equal(rewards)).sum())
    return len(rewards) / differing if differing else 1.0


def _others(rewards: Float[Tensor, "groups members"]) -> Float[Tensor, "groups members others"]:
    """For each member the rewards of all others of its group."""
    groups, members = rewards.shape
    one_another = ~torch.eye(members, dtype=torch.bool, device=rewards.device)
    return rewards.unsqueeze(1).expand(groups, members, members)[:, one_another].view(groups, members, members - 1)


def _divisors(compared: Float[Tensor, "groups columns compared"]) -> Float[Tensor, "groups columns"]:
    """Unbiased deviation of what each column is compared with; 1 where that is one reward, or all are equal."""
    if compared.shape[-1] == 1:
        return torch.ones_like(compared[..., 0])
    deviations = compared.std(dim=-1, unbiased=True) + DEVIATION_EPSILON
    return torch.where(_all_equal(compared).squeeze(-1), torch.ones_like(deviations), deviations)


def _all_equal(rewards: Float[Tensor, "*groups members"]) -> Bool[Tensor, "*groups 1"]:
    """Told without their mean: rounded, it may be an ulp away from equal rewards, which a division would blow up."""
    return rewards.amax(dim=-1, keepdim=True) == rewards.amin(dim=-1, keepdim=True)
