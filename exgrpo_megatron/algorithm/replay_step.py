"""From drawn stored answers to the sequences of a replay step, with every constant of its loss fixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.batch import divisor
from exgrpo_megatron.config import Config, ReplayStepConfig
from exgrpo_megatron.types import AnswerName, LossTerms, Slot, TrainSequence


def stored_sequences(slots: Sequence[Slot], pass_rates: Sequence[float], config: Config) -> list[TrainSequence]:
    """The sequences of one replay step: all of it, that of all ranks together.

    Each response token of an answer y of question q adds -(1 - pass rate of q) g(w) / (longest response x answers) to
    the loss, or / (its own length x answers), or / (tokens of all answers), see `loss_fn.normalizer`. There is no
    entropy bonus.

    Args:
        pass_rates: the running pass rate of each slot's question.
    """
    step, width = config.experience.replay_step, config.policy.generation.max_new_tokens
    num_tokens = sum(len(slot.stored.token_ids) for slot in slots if slot.stored)
    sequences = []
    for slot, pass_rate in zip(slots, pass_rates, strict=True):
        answer = slot.stored
        assert answer is not None
        sequences.append(
            TrainSequence(
                prompt_ids=slot.question.prompt_ids,
                response_ids=answer.token_ids,
                old_logprobs=answer.logprobs,
                advantage=1.0 - pass_rate if step.weight == "one_minus_pass_rate" else 1.0,
                replayed=True,
                policy_weight=1.0
                / divisor(
                    config.loss_fn, len(answer.token_ids), len(slots), num_tokens, width, data_parallel_size=None
                ),
                entropy_weight=0.0,
                stored=AnswerName(slot.question.id, answer.serial) if answer.serial >= 0 else None,
            )
        )
    return sequences


def replay_objective(config: Config) -> Objective:
    """The per-token objective of a replay step, and, for the new tokens that stored ones may join, of the on-policy
    phase."""
    loss, step = config.loss_fn, config.experience.replay_step
    return Objective(
        clip=True,
        clip_min=loss.ratio_clip_min,
        clip_max=loss.ratio_clip_max,
        shaping=step.shaping,
        shaping_beta=step.shaping_beta,
        max_abs_log_ratio=loss.max_abs_log_ratio,
    )


def pushes(terms: LossTerms, step: ReplayStepConfig, max_abs_log_ratio: float) -> NDArray[np.float64]:
    """By how much of its weight each stored token's log-prob is pushed: the derivative of the term in the log-prob,
    of shape [tokens]. A new token's is 1 where the policy has not moved."""
    log_ratio = terms.log_ratio[terms.replayed].astype(np.float64)
    if step.shaping == "log_prob":
        return np.ones_like(log_ratio)
    beta, inside = step.shaping_beta, np.abs(log_ratio) <= max_abs_log_ratio
    w = np.exp(np.clip(log_ratio, -max_abs_log_ratio, max_abs_log_ratio))
    match step.shaping:
        case "ratio":
            push = w * beta / (w + beta) ** 2
        case "normalized_ratio":
            push = w * (1 + beta) ** 2 / (w + beta) ** 2
        case "sqrt":
            push = np.sqrt(w) / 2
        case "clip":
            push = np.where(terms.clipped[terms.replayed], 0.0, w)
        case _:
            push = w
    return np.where(inside, push, 0.0)
