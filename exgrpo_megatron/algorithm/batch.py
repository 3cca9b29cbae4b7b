"""From the groups of a step to the sequences of its optimiser steps, with every constant of the loss fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.advantages import group_advantages, informative_scale
from exgrpo_megatron.algorithm.importance import correction
from exgrpo_megatron.algorithm.length_penalty import length_penalty
from exgrpo_megatron.config import Config, LossConfig
from exgrpo_megatron.types import AnswerName, Group, Logprobs, TrainSequence, Trajectory


def minibatches(
    groups: list[Group], num_minibatches: int, generator: np.random.Generator, *, num_passes: int = 1
) -> list[list[Group]]:
    """Shuffle the groups of a training step and deal them out whole, equally many to each optimiser step; with several
    passes anew for each.

    Raises:
        ValueError: the groups cannot be divided equally.
    """
    size, rest = divmod(len(groups), num_minibatches)
    if rest or not size:
        raise ValueError(f"{len(groups)} groups cannot be dealt out equally to {num_minibatches} optimiser steps")
    orders = [generator.permutation(len(groups)) for _ in range(num_passes)]
    starts = range(0, len(groups), size)
    return [[groups[i] for i in order[start : start + size]] for order in orders for start in starts]


def train_sequences(
    groups: list[Group], config: Config, *, data_parallel_size: int, off_policy: bool = False
) -> list[TrainSequence]:
    """The sequences of one optimiser step, in the order of the groups and their members.

    `groups` is the global minibatch, that of all ranks together: the counts by which the loss is divided are taken
    here, once, so that how the sequences are spread over ranks and micro-batches cannot change the loss. Answers that
    `grpo.overlong_filtering` leaves out are among those a reward is compared with, and in none of these counts.

    `off_policy`: the groups are of replayed answers alone (`repo`), with `repo.weight` and without entropy bonus.

    Raises:
        ValueError: groups of different sizes, unless they are off-policy.
    """
    members = [(group.question, member) for group in groups for member in group.trajectories]
    trained = [
        (question, member, advantage)
        for (question, member), advantage in zip(members, _advantages(groups, config, off_policy), strict=True)
        if not (config.grpo.overlong_filtering and member.stop_reason == "length")
    ]
    loss, num_sequences = config.loss_fn, len(trained)
    num_tokens = sum(len(member.token_ids) for _, member, _ in trained)
    entropy_weight = 0.0 if off_policy else _entropy_weight(loss, num_tokens)
    weight = config.repo.weight if off_policy else 1.0
    width = config.policy.generation.max_new_tokens
    corrected = loss.use_importance_sampling_correction
    policy_weights = {
        length: weight / divisor(loss, length, num_sequences, num_tokens, width, data_parallel_size)
        for length in {len(member.token_ids) for _, member, _ in trained}
    }
    return [
        TrainSequence(
            prompt_ids=question.prompt_ids,
            response_ids=member.token_ids,
            old_logprobs=member.logprobs,
            advantage=advantage,
            replayed=member.replayed,
            policy_weight=policy_weights[len(member.token_ids)],
            entropy_weight=entropy_weight,
            token_weights=_token_weights(member, loss) if corrected else None,
            stored=AnswerName(question.id, member.serial) if member.serial >= 0 else None,
        )
        for question, member, advantage in trained
    ]


def objective(config: Config, *, mixed: bool) -> Objective:
    """The per-token objective of a step; `mixed`: replay is on. A step with demonstrations is always mixed."""
    loss, shown = config.loss_fn, config.demonstrations
    shaping = "ratio" if shown.enabled else "clip" if config.repo.enabled else config.experience.shaping
    return Objective(
        kind="nll" if loss.disable_ppo_ratio else "ratio",
        clip=bool(loss.clip_in_mixed_phase) if mixed or shown.enabled else True,
        clip_min=loss.ratio_clip_min,
        clip_max=loss.ratio_clip_max,
        shaping=shaping,
        shaping_beta=shown.gamma if shown.enabled else config.experience.shaping_beta,
        max_abs_log_ratio=loss.max_abs_log_ratio,
    )


def divisor(
    loss: LossConfig, length: int, num_sequences: int, num_tokens: int, width: int, data_parallel_size: int | None
) -> int:
    """What a response token's policy term is divided by (`loss_fn.normalizer`).

    `length`: of its answer; the other numbers are those of the optimiser step, all ranks together. `data_parallel_size`
    is None where `rank_width` is refused.
    """
    match loss.normalizer:
        case "global_width":
            return width * num_sequences
        case "per_answer_length":
            return max(1, length) * num_sequences
        case "global_tokens":
            return max(1, num_tokens)
        case "rank_width" if data_parallel_size is not None:
            return width * data_parallel_size
    raise AssertionError(f"loss_fn.normalizer = {loss.normalizer!r} is unresolved, or refused here")


def balanced_shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of the sequences each of `size` ranks takes, longest first.

    The ranks get equally many sequences (to within one) and nearly as many tokens: going down from the longest,
    each round of `size` sequences gives the longest one to the rank with the fewest tokens so far. Totals therefore
    never differ by more than the longest sequence. Ties go to the lower index and the lower rank.
    """
    by_length = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    if size == 1:
        return [by_length]
    shares: list[list[int]] = [[] for _ in range(size)]
    totals = [0] * size
    for start in range(0, len(by_length), size):
        lightest_first = sorted(range(size), key=lambda rank: (totals[rank], rank))
        for rank, index in zip(lightest_first, by_length[start : start + size], strict=False):
            shares[rank].append(index)
            totals[rank] += lengths[index]
    return shares


def _token_weights(member: Trajectory, loss: LossConfig) -> Logprobs | None:
    found = correction(member, loss)
    return None if found is None else found.weights


def _advantages(groups: list[Group], config: Config, off_policy: bool) -> list[float]:
    sizes = {group.size for group in groups}
    if len(sizes) > 1 and off_policy:
        return [advantage for group in groups for advantage in _advantages([group], config, off_policy)]
    if len(sizes) > 1:
        raise ValueError(f"groups of one optimiser step must be of one size, found {sorted(sizes)}")
    shaped = config.grpo.reward_shaping.enabled
    rewards = [
        [
            member.reward - length_penalty(len(member.token_ids), config) if shaped else member.reward
            for member in group.trajectories
        ]
        for group in groups
    ]
    given = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(
        given,
        normalize=config.grpo.normalize_rewards,
        leave_one_out=config.grpo.use_leave_one_out_baseline,
    )
    if config.grpo.scale_by_informative_groups and not off_policy:
        advantages = advantages * informative_scale(given)
    return advantages.flatten().tolist()


def _entropy_weight(loss: LossConfig, num_tokens: int) -> float:
    """Weight of one token's entropy; 0 where the actor adds a mean of its own a micro-batch, or there is no bonus."""
    if loss.entropy_bonus != "global_mean":
        return 0.0
    return loss.entropy_coeff / max(1, num_tokens)
