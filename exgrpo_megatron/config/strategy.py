"""Which keys mean something under which `experience.strategy`; the others are refused by name."""

from __future__ import annotations

from typing import Any

from exgrpo_megatron.config.experience import ExperienceConfig
from exgrpo_megatron.config.objective import VARIANTS, LossConfig, VariantName, whole_share
from exgrpo_megatron.config.replay_step import ReplayStepConfig

STRATEGY_SWITCHES: dict[str, dict[str, Any]] = {"replay_step": {"experience.retire_from": "never"}}
"""Switches of `VARIANTS` that a strategy sets in place of the variant."""

_OF_GROUPS_BY_VARIANT = (
    "experience.bucket_weight",
    "experience.answer_choice",
    "experience.unused_fresh",
    "experience.allow_duplicates",
    "loss_fn.clip_in_mixed_phase",
)
_OF_GROUPS = (
    "replay_ratio", "start_epoch", "start_step", "stop_pass_rate", "pass_rate_steps", "bucket_sigma", "shaping",
    "shaping_beta",
)  # fmt: skip


def check_strategy(variant: VariantName, experience: ExperienceConfig, loss: LossConfig) -> None:
    """Raise ValueError where a key is set that does nothing under the strategy, or two do not go together."""
    if experience.strategy == "exgrpo":
        _refuse_changed(experience.replay_step)
        return
    if loss.normalizer == "rank_width":
        raise ValueError(
            f"loss_fn.normalizer = 'rank_width' with experience.strategy = {experience.strategy!r}: the released code "
            "has no replay step whose scale would be reproduced; set it to 'global_width' or 'per_answer_length'"
        )
    if experience.replay_step.joint and loss.entropy_bonus == "per_micro_batch":
        raise ValueError(
            "loss_fn.entropy_bonus = 'per_micro_batch' with experience.replay_step.joint = true: the stored "
            "answers, which have no entropy bonus, would be in the means; set it to 'global_mean' or 'none', or "
            "joint to false"
        )
    if experience.strategy == "replay_step":
        _refuse_keys_of_groups(variant, experience, loss)
    elif experience.replay_step.joint:
        raise ValueError(
            "experience.replay_step.joint = true with experience.strategy = 'both': stored answers of both kinds would "
            "be in one optimiser step, which has one shaping; set strategy to 'replay_step', or joint to false"
        )


def check_size(replay_step: ReplayStepConfig, members_of_a_step: int, updates_per_step: int) -> None:
    """Raise ValueError where a replay step would be empty, or has no single optimiser step to join.

    `members_of_a_step`: B x K.
    """
    if whole_share(replay_step.size, members_of_a_step) < 1:
        raise ValueError(
            f"experience.replay_step.size = {replay_step.size} times grpo.num_prompts_per_step x "
            f"grpo.num_generations_per_prompt = {members_of_a_step} is less than one answer: raise it"
        )
    if replay_step.joint and updates_per_step > 1:
        raise ValueError(
            f"experience.replay_step.joint = true, but a step has {updates_per_step} optimiser steps: set "
            "policy.train_global_batch_size to grpo.num_prompts_per_step x grpo.num_generations_per_prompt, or joint "
            "to false"
        )


def _refuse_changed(replay_step: ReplayStepConfig) -> None:
    for name, field in type(replay_step).model_fields.items():
        value = getattr(replay_step, name)
        if value != field.default:
            raise ValueError(
                f"experience.replay_step.{name} = {value} has no effect with experience.strategy = 'exgrpo': set it "
                "back, or strategy to 'replay_step' or 'both'"
            )


def _refuse_keys_of_groups(variant: VariantName, experience: ExperienceConfig, loss: LossConfig) -> None:
    sections = {"experience": experience, "loss_fn": loss}
    expected = {name: VARIANTS[name][variant] for name in _OF_GROUPS_BY_VARIANT}
    expected |= {f"experience.{name}": ExperienceConfig.model_fields[name].default for name in _OF_GROUPS}
    for dotted, idle in expected.items():
        section, name = dotted.split(".")
        value = getattr(sections[section], name)
        if value != idle:
            raise ValueError(
                f"{dotted} = {value!r} has no effect with experience.strategy = 'replay_step', where no stored answer "
                f"joins a group: set it back to {idle!r}{_instead(name)}"
            )
    start = experience.start_pass_rate
    if start not in (None, ExperienceConfig.model_fields["start_pass_rate"].default):
        raise ValueError(
            f"experience.start_pass_rate = {start} has no effect with experience.strategy = 'replay_step': set it "
            "back, or experience.replay_step.start_pass_rate in its place"
        )


def _instead(name: str) -> str:
    return f", or experience.replay_step.{name} in its place" if name in ReplayStepConfig.model_fields else ""
