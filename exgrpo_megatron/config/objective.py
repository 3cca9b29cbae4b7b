"""The algorithm: groups, loss and experience, and the switches in which its variants differ."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field

from exgrpo_megatron.config.section import (
    Count,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Share,
    key,
)

VariantName = Literal["corrected", "paper", "code"]
BucketWeight = Literal["counts", "accuracy", "linear", "sqrt", "linear_clip", "uniform"]
AnswerChoice = Literal["lowest_mean_entropy", "lowest_total_entropy", "lowest_perplexity", "random"]
Normalizer = Literal["global_width", "per_answer_length", "rank_width"]
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


class GRPOConfig(Section):
    """How many questions and answers a step has, and how rewards become advantages."""

    num_prompts_per_step: PositiveInt = key(32, "questions in one step, replayed ones included (B)", "questions")
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = key(8, "members of a group (K)", "answers")
    max_num_steps: PositiveInt = key(100, "training steps of the whole run", "steps")
    seed: Seed = key(42, "seed of every random draw of the run")
    val_period: Count = key(10, "steps between evaluations on the validation set; 0: never", "steps")
    val_at_start: bool = key(True, "evaluate before the first step")
    normalize_rewards: bool = key(False, "divide advantages by the group's (unbiased) standard deviation")
    use_leave_one_out_baseline: bool = key(False, "baseline of a member is the mean of the others in its group")


class LossConfig(Section):
    """The per-token objective."""

    ratio_clip_min: Annotated[float, Field(gt=0, lt=1)] = key(0.2, "PPO clip below: ratios under 1 - this")
    ratio_clip_max: PositiveFloat = key(0.2, "PPO clip above: ratios over 1 + this")
    clip_in_mixed_phase: bool | None = key(None, "clip new tokens also while replay is on; null: as the variant says")
    normalizer: Normalizer | None = key(
        None,
        "global_width: / (max_new_tokens x sequences of the optimiser step); per_answer_length: mean over answers of "
        "their token mean; rank_width: / (max_new_tokens x data-parallel ranks), the released code's; "
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


class ExperienceConfig(Section):
    """What is kept, when replay starts, and what is replayed."""

    enabled: bool = key(True, "false: on-policy GRPO, nothing stored or replayed")
    replay_ratio: Share = key(0.5, "share of a step's questions drawn from experience (rho)")
    start_pass_rate: Share | None = key(
        0.35, "replay starts after a step whose pass rate is above this (strict); null: from the first step"
    )
    bucket_weight: BucketWeight | None = key(
        None,
        "weight of a bucket with k of K correct. counts: normal(k; K/2, bucket_sigma); accuracy: "
        "normal(k/K; 0.5, bucket_sigma); linear: k/K; sqrt: sqrt(k/K); linear_clip: min(k/K, 0.5); uniform: every "
        "stored question alike; null: as the variant says",
    )
    bucket_sigma: PositiveFloat = key(
        1.0, "width of the normal bucket weights, in counts or accuracy; the other weights have none"
    )
    answer_choice: AnswerChoice | None = key(
        None, "which stored answer of a drawn question is replayed, under the current policy; null: as the variant says"
    )
    stored_answer: Literal["tokens", "text"] | None = key(
        None, "text: re-tokenised from text as in the released code, log-probs padded; null: as the variant says"
    )
    collect_from: Literal["start", "mixed_phase"] | None = key(
        None, "when correct answers begin to be stored; null: as the variant says"
    )
    retire_from: Literal["replay", "replay_and_fresh"] | None = key(
        None,
        "where a question with all K correct no longer appears: among replayed ones, or from the next epoch on among "
        "new ones too, of which a batch and 20 always stay; null: as the variant says",
    )
    unused_fresh: Literal["keep", "discard"] | None = key(
        None, "new questions displaced by replayed ones: keep in line, or throw away; null: as the variant says"
    )
    allow_duplicates: bool | None = key(
        None, "a question may stand in a batch both as new and as replayed; null: as the variant says"
    )
    shaping: Literal["ratio", "none"] = key("ratio", "ratio: f(w) = w / (w + shaping_beta) on replayed tokens; none: w")
    shaping_beta: PositiveFloat = key(0.1, "beta of f(w)")
    prefill_path: Name | None = key(
        None, "experience file of another run, or made by `exgrpo prefill`, to begin with", "path"
    )


def whole_share(share: float, count: int) -> int:
    """`floor(share * count)`, with the share taken as the decimal it was written as.

    In binary floating point 0.29 * 100 is 28.999...; a recipe that says 0.29 of 100 means 29.
    """
    return math.floor(Fraction(str(share)) * count)
