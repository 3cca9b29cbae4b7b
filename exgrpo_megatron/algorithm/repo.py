"""Which of a question's kept answers are replayed as a group of their own (RePO, arXiv:2506.09340)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exgrpo_megatron.config import RepoChoice


def choose_answers(choice: RepoChoice, rewards: Sequence[float], num: int, rng: np.random.Generator) -> list[int]:
    """Indices of at most `num` answers, ascending, given the reward of each, oldest first.

    `rng` is used by `random` alone.
    """
    total = len(rewards)
    if choice == "full_scope" or num >= total:
        return list(range(total))
    by_reward = sorted(range(total), key=lambda index: -rewards[index])
    match choice:
        case "recent":
            chosen = list(range(total - num, total))
        case "best_reward":
            chosen = by_reward[:num]
        case "symmetric":
            chosen = _ends(by_reward, num, num - num // 2)
        case "variance":
            # The subset of most variance is made of a highest and num - a lowest values: any value between two chosen
            # ones lies nearer to their mean than one of the ends.
            chosen = max(
                (_ends(by_reward, num, highest) for highest in range(num + 1)), key=lambda ends: _spread(rewards, ends)
            )
        case "random":
            chosen = rng.choice(total, num, replace=False).tolist()
    return sorted(chosen)


def _ends(by_reward: list[int], num: int, highest: int) -> list[int]:
    return by_reward[:highest] + by_reward[len(by_reward) - (num - highest) :]


def _spread(rewards: Sequence[float], chosen: list[int]) -> tuple[float, float]:
    """Variance, then sum; what differs by rounding alone is equal."""
    values = np.array([rewards[index] for index in chosen], dtype=np.float64)
    return round(float(values.var()), 12), round(float(values.sum()), 12)
