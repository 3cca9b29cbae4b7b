"""The algorithm: groups and loss, and the switches in which its variants differ."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.section import (
    Count,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    key,
)

VariantName = Literal["corrected", "paper", "code"]
Normalizer = Literal["global_width", "per_answer_length", "global_tokens", "rank_width"]
EntropyBonus = Literal["global_mean", "per_micro_batch", "none"]
VARIANTS: dict[str, dict[VariantName, Any]] = {
    "experience.bucket_weight": {"paper": "accuracy", "code": "counts", "corrected": "counts"},
    "loss_fn.clip_in_mixed_phase": {"paper": True, "code": False, "corrected": False},
    "loss_fn.normalizer": {"paper": "per_answer_length", "code": "rank_width", "corrected": "global_width"},
    "loss_fn.entropy_bonus": {"paper": "global_mean", "code": "per_micro_batch", "corrected": "global_mean"},
    "experience.answer_choice": {
        "paper": "lowest_mean_entropy",
        "code": "lowest_total_entropy",
        "corrected": "lowest_mean_entropy",
    },
    "experience.stored_answer": {"paper": "tokens", "code": "text", "corrected": "tokens"},
    "experience.collect_from": {"paper": "start", "code": "mixed_phase", "corrected": "start"},
    "experience.retire_from": {"paper": "replay", "code": "replay_and_fresh", "corrected": "replay_and_fresh"},
    "experience.unused_fresh": {"paper": "keep", "code": "discard", "corrected": "keep"},
    "data.epoch_order": {"paper": "reshuffle", "code": "same", "corrected": "reshuffle"},
    "experience.allow_duplicates": {"paper": False, "code": True, "corrected": False},
}
"""Every switch on which the paper and its released code differ, by dotted key (see docs/algorithm.md)."""


class RewardShapingConfig(Section):
    """The soft penalty of answers near the longest length (DAPO); k and pass rates go by what is correct, not by it."""

    enabled: bool = key(False, "take a penalty that grows with the length off the rewards advantages are made from")
    overlong_buffer_length: PositiveInt | None = key(
        None, "tokens before max_response_length over which the penalty grows from 0 to its whole", "tokens"
    )
    overlong_buffer_penalty: PositiveFloat | None = key(None, "the whole penalty; a correct answer's reward is 1")
    max_response_length: PositiveInt | None = key(
        None, "length from which the penalty is whole; null: policy.generation.max_new_tokens", "tokens"
    )

    @model_validator(mode="after")
    def _keys_belong_together(self) -> RewardShapingConfig:
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "enabled"}
        if not self.enabled:
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name} = {value} has no effect with enabled = false: set one of them back")
            return self
        for name in ("overlong_buffer_length", "overlong_buffer_penalty"):
            if given[name] is None:
                raise ValueError(f"enabled = true, but {name} is null: say how long and how large the penalty is")
        return self


class GRPOConfig(Section):
    """How many questions and answers a step has, and how rewards become advantages."""

    num_prompts_per_step: PositiveInt = key(32, "questions in one step, replayed ones included (B)", "questions")
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = key(8, "members of a group (K)", "answers")
    num_iterations: PositiveInt = key(1, "passes over the answers of a step (PPO epochs)", "passes")
    max_num_steps: PositiveInt = key(100, "training steps of the whole run", "steps")
    seed: Seed = key(42, "seed of every random draw of the run")
    val_period: Count = key(
        10,
        "steps between evaluations on the validation set, besides the one after the last step; 0: that alone",
        "steps",
    )
    val_at_start: bool = key(True, "evaluate before the first step")
    normalize_rewards: bool = key(False, "divide advantages by the group's (unbiased) standard deviation")
    use_leave_one_out_baseline: bool = key(
        False,
        "baseline of a member is the mean of the others in its group; with normalize_rewards its deviation too",
    )
    scale_by_informative_groups: bool = key(
        False,
        "multiply advantages by the groups of the optimiser step over those whose rewards differ (GPG): groups without "
        "an advantage do not weaken the others",
    )
    overlong_filtering: bool = key(
        False, "leave truncated answers out of the loss and its divisors, and do not store them for replay"
    )
    reward_shaping: RewardShapingConfig = key(RewardShapingConfig(), "penalty of answers near the longest length")


class LossConfig(Section):
    """The per-token objective."""

    disable_ppo_ratio: bool = key(
        False,
        "true: -advantage x log-prob, without ratio, clip or shaping (GPG, REINFORCE); on-policy only",
    )
    ratio_clip_min: Annotated[float, Field(gt=0, lt=1)] = key(0.2, "PPO clip below: ratios under 1 - this")
    ratio_clip_max: PositiveFloat = key(0.2, "PPO clip above: ratios over 1 + this")
    clip_in_mixed_phase: bool | None = key(None, "clip new tokens also while replay is on; null: as the variant says")
    normalizer: Normalizer | None = key(
        None,
        "global_width: / (max_new_tokens x sequences of the optimiser step); per_answer_length: mean over answers of "
        "their token mean; global_tokens: mean over all tokens of the optimiser step; rank_width: / (max_new_tokens x "
        "data-parallel ranks), the released code's; "
        "null: as the variant says",
    )
    entropy_coeff: NonNegativeFloat = key(0.001, "weight of the entropy bonus (nats)")
    entropy_bonus: EntropyBonus | None = key(
        None,
        "global_mean: mean over response tokens of the optimiser step; per_micro_batch: a mean added once per "
        "micro-batch, the released code's; none; null: as the variant says",
    )
    old_logprobs: Literal["recomputed", "engine"] = key(
        "recomputed", "denominators of the ratio of new answers: recomputed by the policy, or the engine's own"
    )
    # exp(88) is the last that float32 can hold.
    max_abs_log_ratio: Annotated[float, Field(gt=0, le=80)] = key(
        20.0, "log-ratios are clamped to +- this before exp; hits are counted"
    )
    use_importance_sampling_correction: bool = key(
        False,
        "weigh the tokens of new answers by w = exp(recomputed log-prob - engine's), a constant; the entropy bonus and "
        "replayed answers are not weighed",
    )
    rollout_is: Literal["token", "sequence"] = key(
        "token", "w of each token, or the product over its answer for all of them"
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] = key(
        "tis",
        "tis: w is cut to the limits; icepop: a token whose w is outside them weighs 0; seq-mask-tis: so does every "
        "token of an answer whose geometric mean of w is outside them, and the other w are not cut",
    )
    truncated_importance_sampling_ratio: PositiveFloat | None = key(None, "upper limit of w; null: w has no limits")
    truncated_importance_sampling_ratio_min: PositiveFloat | None = key(None, "lower limit of w; null: 0, tis only")

    @model_validator(mode="after")
    def _correction_can_be_made(self) -> LossConfig:
        if self.use_importance_sampling_correction:
            if self.old_logprobs == "engine":
                raise ValueError(
                    "use_importance_sampling_correction = true, but old_logprobs = 'engine': the ratio against the "
                    "engine's log-probs is such a correction already, and w would be 1; set old_logprobs to "
                    "'recomputed', or use_importance_sampling_correction to false"
                )
            return self
        for name in _CORRECTION_KEYS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect with use_importance_sampling_correction = false: "
                    "set one of them back"
                )
        return self

    @model_validator(mode="after")
    def _bonus_has_its_weight(self) -> LossConfig:
        if self.entropy_bonus == "none" and self.entropy_coeff not in (
            0,
            type(self).model_fields["entropy_coeff"].default,
        ):
            raise ValueError(
                f"entropy_coeff = {self.entropy_coeff} has no effect with entropy_bonus = 'none': set one of them back"
            )
        return self

    @model_validator(mode="after")
    def _ratio_keys_have_a_ratio(self) -> LossConfig:
        for name in _RATIO_KEYS if self.disable_ppo_ratio else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect with disable_ppo_ratio = true: set one of them "
                    "back"
                )
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> LossConfig:
        kind, level = self.truncated_importance_sampling_type, self.rollout_is
        highest, lowest = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind != "tis" and (highest is None or lowest is None):
            raise ValueError(
                f"truncated_importance_sampling_type = {kind!r} needs both limits, but "
                f"truncated_importance_sampling_ratio_min and truncated_importance_sampling_ratio are {lowest} and "
                f"{highest}: set them"
            )
        if highest is None and lowest is not None:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min = {lowest}, but truncated_importance_sampling_ratio is null: "
                "set it too"
            )
        if highest is not None and lowest is not None and lowest > highest:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min = {lowest} is above truncated_importance_sampling_ratio = "
                f"{highest}"
            )
        if kind == "seq-mask-tis" and level == "sequence":
            raise ValueError(
                "truncated_importance_sampling_type = 'seq-mask-tis' masks answers and weighs tokens, but rollout_is = "
                "'sequence': set it to 'token', or the type to 'icepop'"
            )
        return self


_RATIO_KEYS = ("ratio_clip_min", "ratio_clip_max")
_CORRECTION_KEYS = (
    "rollout_is",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
)


def whole_share(share: float, count: int) -> int:
    """`floor(share * count)`, with the share taken as the decimal it was written as.

    In binary floating point 0.29 * 100 is 28.999...; a recipe that says 0.29 of 100 means 29.
    """
    return math.floor(Fraction(str(share)) * count)
