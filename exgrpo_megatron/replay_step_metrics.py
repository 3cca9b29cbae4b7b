"""What the replay steps of a training step did, and the numbers of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from exgrpo_megatron.algorithm.replay_step import pushes
from exgrpo_megatron.config import Config
from exgrpo_megatron.ratio_metrics import ratio_summary
from exgrpo_megatron.types import LossTerms, Slot, TrainSequence, UpdateResult


@dataclass
class ReplayStepRecord:
    """The stored answers of all replay steps of a training step, the same on every rank but for the terms inside
    `updates`."""

    sequences: list[TrainSequence] = field(default_factory=list)
    updates: list[UpdateResult] = field(default_factory=list)
    """None where the stored answers joined an update on new ones."""
    slots: list[Slot] = field(default_factory=list)
    """The questions and stored answers they were made of."""
    num_capped: int = 0
    """Tokens that a guard's clip left without a gradient."""
    ages: list[int] = field(default_factory=list)
    """Steps since each answer was stored."""
    num_drawable: int = 0
    """Stored questions that the last of them could draw from."""
    num_scored: int = 0
    num_padded: int = 0
    """Log-probs that the text form made up."""


def replay_step_metrics(config: Config, record: ReplayStepRecord, terms: LossTerms) -> dict[str, float]:
    """Every metric of replay steps; none where the recipe has no such steps.

    `terms`: of all ranks, of the replay steps, or of the updates that stored answers joined.
    """
    if not config.experience.in_steps:
        return {}
    bound = config.loss_fn.max_abs_log_ratio
    answers: dict[str, float] = {
        "replay_step/answers": len(record.sequences),
        "replay_step/updates": len(record.updates),
    }
    if not record.sequences:
        return answers
    log_ratio = terms.log_ratio[terms.replayed]
    has_ratio = config.experience.replay_step.shaping != "log_prob"
    return {
        **answers,
        "replay_step/mean_weight": float(np.mean([sequence.advantage for sequence in record.sequences])),
        "replay_step/mean_age_steps": float(np.mean(record.ages)),
        "replay_step/mean_push": float(pushes(terms, config.experience.replay_step, bound).mean()),
        "replay_step/clamped_ratios": int((np.abs(log_ratio) > bound).sum()) if has_ratio else 0,
        **ratio_summary("ratio_replay_step", log_ratio),
        **_of_updates(record.updates),
    }


def _of_updates(updates: Sequence[UpdateResult]) -> dict[str, float]:
    if not updates:
        return {}
    return {
        "replay_step/loss": float(np.mean([update.loss for update in updates])),
        "replay_step/grad_norm": float(np.max([update.grad_norm for update in updates])),
        "replay_step/learning_rate": updates[-1].learning_rate,
        "replay_step/skipped_updates": sum(update.skipped for update in updates),
    }
