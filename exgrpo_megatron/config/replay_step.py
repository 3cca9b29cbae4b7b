"""The replay step: an optimiser step on stored answers alone, beside those on new ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.choices import (
    DEFAULT_BETA,
    NORMAL_WEIGHTS,
    SHAPING_MEANING,
    AnswerChoice,
    BucketWeight,
    Shaping,
    check_beta,
)
from exgrpo_megatron.config.section import PositiveFloat, PositiveInt, Section, Share, key


class ReplayStepConfig(Section):
    """What a replay step trains on, and how hard."""

    size: PositiveFloat = key(
        2.0,
        "stored answers of a replay step, one a question, in multiples of num_prompts_per_step x "
        "num_generations_per_prompt, rounded down; all stored questions where they are fewer",
        "x B x K",
    )
    num_steps: PositiveInt = key(1, "replay steps after the updates on new answers, each with a draw of its own")
    start_pass_rate: Share | None = key(
        None,
        "replay steps begin after a step whose pass rate of new questions is above this (strict); null: as soon as an "
        "answer is stored",
    )
    bucket_weight: BucketWeight = key("counts", "weight of a bucket in the draw, as in experience.bucket_weight")
    bucket_sigma: PositiveFloat = key(1.0, "width of the normal bucket weights, in counts or accuracy")
    answer_choice: AnswerChoice = key(
        "random", "which stored answer of a drawn question is trained on, as in experience.answer_choice"
    )
    weight: Literal["one_minus_pass_rate", "one"] = key(
        "one_minus_pass_rate",
        "weight of a stored answer, in place of an advantage. one_minus_pass_rate: 1 - the running pass rate of its "
        "question over new answers, which begins with its first group's mean; one: 1",
    )
    pass_rate_decay: Annotated[float, Field(ge=0, lt=1)] = key(
        0.5, "how much of a question's running pass rate stays when a group of new answers is added"
    )
    shaping: Shaping = key("normalized_ratio", f"what a token has in place of its ratio w. {SHAPING_MEANING}")
    shaping_beta: PositiveFloat = key(DEFAULT_BETA, "b of the two ratio shapings")
    lr_multiplier: PositiveFloat = key(1.0, "learning rate of the replay steps, in multiples of the schedule's")
    joint: bool = key(
        False, "put the stored answers into the optimiser step on new ones, in place of a step of their own"
    )

    @model_validator(mode="after")
    def _no_key_is_without_effect(self) -> ReplayStepConfig:
        check_beta(self.shaping, self.shaping_beta)
        dead = []
        if self.bucket_weight not in NORMAL_WEIGHTS:
            dead.append(("bucket_sigma", f"bucket_weight = {self.bucket_weight!r}"))
        if self.weight == "one":
            dead.append(("pass_rate_decay", "weight = 'one'"))
        if self.joint:
            dead += [("num_steps", "joint = true"), ("lr_multiplier", "joint = true")]
        for name, reason in dead:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(f"{name} = {value} has no effect with {reason}: set one of them back")
        return self
