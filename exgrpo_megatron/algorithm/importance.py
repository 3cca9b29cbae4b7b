"""Importance correction between the engine that sampled an answer and the policy that trains on it, and what the
ratios of stored answers were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import LossConfig
from exgrpo_megatron.types import Logprobs, LossTerms, ReplayedAnswer, TrainSequence, Trajectory


class Correction(NamedTuple):
    """Of one answer; both have shape [tokens]."""

    weights: Logprobs
    limited: NDArray[np.bool_]
    """True where the weight is not exp(log pi_trainer - log pi_engine) itself: capped, raised or masked."""


def correction(member: Trajectory, loss: LossConfig) -> Correction | None:
    """The constant weights of a new answer's tokens; None where there is no correction, as for every replayed answer.

    A replayed answer's ratio is against the log-probs recorded when it was written: the engine has no part in it.
    """
    if not loss.use_importance_sampling_correction or member.engine_logprobs is None:
        return None
    return corrected(member.logprobs, member.engine_logprobs, loss)


def corrected(trainer: Logprobs, engine: Logprobs, loss: LossConfig) -> Correction:
    """w = exp(trainer - engine) of every token, or of the whole answer for each of its tokens, within its limits.

    `trainer` and `engine` are log-probs of the same tokens at the same temperature. Log-ratios are clamped to
    +-`loss.max_abs_log_ratio` before exp.
    """
    log_ratios = trainer.astype(np.float64) - engine.astype(np.float64)
    if loss.rollout_is == "sequence":
        log_ratios = np.full_like(log_ratios, log_ratios.sum())
    bound = loss.max_abs_log_ratio
    ratios = np.exp(log_ratios.clip(-bound, bound))
    weights = _within_limits(ratios, log_ratios, loss)
    return Correction(weights.astype(np.float32), (weights != ratios) | (np.abs(log_ratios) > bound))


def replayed_answers(sequences: Sequence[TrainSequence], terms: LossTerms) -> tuple[ReplayedAnswer, ...]:
    """The stored answers among the sequences of an update, whose tokens `terms` has in the same order."""
    ends = np.cumsum([len(sequence.response_ids) for sequence in sequences])
    found = []
    with np.errstate(over="ignore"):
        for sequence, end in zip(sequences, ends.tolist(), strict=True):
            length = len(sequence.response_ids)
            if sequence.stored is not None and length:
                ratios = np.exp(terms.log_ratio[end - length : end], dtype=np.float64)
                mean = float(np.add.reduce(ratios)) / length
                found.append(ReplayedAnswer(sequence.stored, mean, float(np.maximum.reduce(ratios))))
    return tuple(found)


def _within_limits(
    ratios: NDArray[np.float64], log_ratios: NDArray[np.float64], loss: LossConfig
) -> NDArray[np.float64]:
    highest, lowest = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min or 0.0
    if highest is None:
        return ratios
    if loss.truncated_importance_sampling_type == "tis":
        return ratios.clip(lowest, highest)
    judged = ratios
    if loss.truncated_importance_sampling_type == "seq-mask-tis":
        judged = np.full_like(ratios, np.exp(log_ratios.mean()) if len(ratios) else 1.0)
    return np.where((judged >= lowest) & (judged <= highest), ratios, 0.0)
