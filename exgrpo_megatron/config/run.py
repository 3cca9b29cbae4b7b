"""What surrounds the RL steps: warm start, rewards, evaluation, checkpoints, files, processes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from exgrpo_megatron.config.data import DataSourceConfig
from exgrpo_megatron.config.eval_sets import EVAL_GROUPS, EvalSetConfig
from exgrpo_megatron.config.megatron import OptimizerConfig, SchedulerConfig
from exgrpo_megatron.config.section import (
    Count,
    FunctionName,
    Name,
    PositiveInt,
    Section,
    Seed,
    Share,
    Temperature,
    key,
)


class SFTConfig(Section):
    """Supervised fine-tuning: `exgrpo sft`, and the warm start of `exgrpo train`."""

    warm_start: bool = key(False, "run it before the first training step (kept and reused by later runs)")
    warm_start_dir: Name = key("runs/warm_starts", "where warm starts are kept", "path")
    data: DataSourceConfig | None = key(None, "questions with solutions; null: data.train")
    generator_worked_share: Share = key(0.3, "share of generated solutions that show their working; others guess")
    max_num_steps: PositiveInt = key(700, "optimiser steps", "optimiser steps")
    train_global_batch_size: PositiveInt = key(64, "sequences of one optimiser step", "sequences")
    seed: Seed = key(1000, "seed of the order and of generated solutions")
    optimizer: OptimizerConfig = key(OptimizerConfig(lr=1e-5), "optimiser")
    scheduler: SchedulerConfig = key(
        SchedulerConfig(lr_decay_style="linear", lr_warmup_iters=50), "learning-rate schedule"
    )


class MathEnvConfig(Section):
    """Rewards of mathematical answers."""

    exact_text: bool = key(
        False,
        "true: an answer is right if its box holds the very text of the gold answer (06 is not 6), without Math-Verify "
        "and its worker processes",
    )
    num_workers: PositiveInt = key(2, "worker processes on one rank", "processes")
    math_verify_impl: Literal["hf_math_verify"] = key("hf_math_verify", "the verifier")
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = key(
        5.0, "time for one answer; then its worker is killed and the reward is 0", "s"
    )
    require_box: bool = key(True, "an answer without a closed \\boxed{} gets 0")
    require_literal: bool = key(False, "a boxed answer that is no plain number or fraction gets 0")
    max_boxed_chars: PositiveInt = key(256, "a longer boxed answer gets 0", "characters")
    check_gold: bool = key(
        True,
        "before the first step, grade every gold answer against itself and report those that no response can match; "
        "costs 1 to 10 ms a distinct answer and worker",
    )
    cache_size: Count = key(100_000, "verdicts remembered", "verdicts")
    all_zero_alarm_steps: PositiveInt = key(5, "warn when every reward was 0 for this many steps", "steps")
    format_alarm_share: Share = key(0.9, "warn when the format rules reject more than this share of a step's answers")

    @model_validator(mode="after")
    def _literal_needs_box(self) -> MathEnvConfig:
        if self.require_literal and not self.require_box:
            raise ValueError("require_literal = true judges boxed answers only, but require_box = false admits others")
        return self

    @model_validator(mode="after")
    def _exact_text_needs_no_math_verify(self) -> MathEnvConfig:
        if not self.exact_text:
            return self
        if not self.require_box:
            raise ValueError("exact_text = true compares boxed answers only, but require_box = false admits others")
        for name in ("num_workers", "timeout_s", "require_literal", "cache_size"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} has no effect with exact_text = true, which needs no worker: "
                    "set one of them back"
                )
        return self


class EnvConfig(Section):
    """Where rewards come from."""

    math: MathEnvConfig = key(MathEnvConfig(), "mathematical answers")
    reward_function: FunctionName | None = key(
        None,
        "package.module:function or file.py:function of your own in place of Math-Verify, called with the texts "
        "question, response and answer and giving a number, in worker processes as that is; of env.math apply "
        "num_workers, timeout_s, cache_size and all_zero_alarm_steps (docs/rewards.md)",
    )
    correct_above: float = key(
        0.0, "an answer whose reward is above this counts as correct: in k, pass rates, storing and retiring"
    )
    worker_memory_mib: Annotated[int, Field(ge=256)] = key(
        1024, "address space of one worker of reward_function, which makes room at half of it", "MiB"
    )

    @model_validator(mode="after")
    def _keys_of_one_verifier(self) -> EnvConfig:
        function = self.reward_function
        checked = (
            [(name, self, type(self)) for name in ("correct_above", "worker_memory_mib")]
            if function is None
            else [(name, self.math, MathEnvConfig) for name in MathEnvConfig.model_fields if name not in _FOR_BOTH]
        )
        for name, section, kind in checked:
            if getattr(section, name) != kind.model_fields[name].default:
                prefix = "" if function is None else "math."
                raise ValueError(
                    f"{prefix}{name} = {getattr(section, name)!r} has no effect with reward_function = {function!r}: "
                    f"set it back to {kind.model_fields[name].default!r} (a recipe beneath this one may have set it), "
                    "or leave the function out"
                )
        return self


_FOR_BOTH = ("num_workers", "timeout_s", "cache_size", "all_zero_alarm_steps")


class EvalConfig(Section):
    """Evaluation on the validation set, during training and by `exgrpo eval`."""

    num_tests_per_prompt: PositiveInt = key(1, "samples a question at eval.temperature", "answers")
    temperature: Temperature = key(1.0, "temperature of the sampled pass rate")
    greedy: bool = key(True, "also measure greedy decoding")
    seed: Seed = key(123, "seed of the samples, and for sets of shuffled choices and bootstrap intervals")
    sets: dict[str, EvalSetConfig] = key({}, "question sets of `exgrpo eval` by name (docs/evaluation.md)")
    save_every: PositiveInt = key(
        1024, "an evaluation of sets writes its answers down after this many, whole questions at a time", "answers"
    )
    bootstrap_samples: PositiveInt = key(2000, "resamples of the questions of a set for its 95% intervals", "resamples")

    @field_validator("sets")
    @classmethod
    def _sets_name_files(cls, value: dict[str, EvalSetConfig]) -> dict[str, EvalSetConfig]:
        for name in value:
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a set: letters, digits, _, - and . after the first")
        if len({name.casefold() for name in value}) < len(value):
            raise ValueError(f"{sorted(value)}: two names of sets differ in case alone, and so would their files")
        return value

    def temperature_of(self, name: str) -> float:
        """Sampling temperature of a set; 0: greedy."""
        given = self.sets[name].temperature
        return self.temperature if given is None else given

    @property
    def sets_in_training(self) -> dict[str, EvalSetConfig]:
        """The sets that a run evaluates while it trains."""
        return {name: chosen for name, chosen in self.sets.items() if chosen.in_training}

    @property
    def training_metrics(self) -> list[str]:
        """Names of what is measured of these sets."""
        sets = self.sets_in_training
        there = {chosen.group for chosen in sets.values()}
        groups = [f"validation/macro_avg/{group}" for group in EVAL_GROUPS if group in there]
        return [*(metric for name, chosen in sets.items() for metric in chosen.training_metrics(name)), *groups]


_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class CheckpointConfig(Section):
    """What is saved, and what is kept."""

    enabled: bool = key(True, "save checkpoints, and resume from the newest one")
    checkpoint_dir: Name | None = key(None, "null: <logger.log_dir>/checkpoints", "path")
    save_period: PositiveInt = key(20, "steps between checkpoints; the last step is always saved", "steps")
    async_save: bool = key(
        True,
        "write checkpoints while training goes on, from a copy in host memory of what a process saves (weights, "
        "optimiser state); false: stop the step until they are written, without the copy",
    )
    keep_last_n: PositiveInt = key(2, "newest checkpoints kept", "checkpoints")
    keep_top_k: PositiveInt | None = key(
        1, "best checkpoints in metric_name kept beside them; null: none is ever deleted", "checkpoints"
    )
    metric_name: str = key(
        "validation/pass_rate_greedy",
        "what the best checkpoints are best in, of those whose step was evaluated: validation/pass_rate_t1 or "
        "validation/pass_rate_greedy, of one category with /<category> behind it, validation/reward_t1 or "
        "validation/reward_greedy (env.reward_function), validation/response_length, validation/truncated, or, of "
        "eval.sets with in_training, validation/avg/<set>, validation/maj/<set>, validation/pass/<set>/<k> and "
        "validation/macro_avg/<group>; where nothing is evaluated no checkpoint is the best",
    )
    higher_is_better: bool = key(True, "direction of metric_name")
    export_hf: bool = key(True, "write <logger.log_dir>/hf at the end, checked against the trainer")

    @field_validator("metric_name")
    @classmethod
    def _metric_is_measured(cls, value: str) -> str:
        if not _VALIDATION_METRIC.fullmatch(value):
            raise PydanticCustomError("metric", "Input should be a metric of the evaluations")
        return value


_VALIDATION_METRIC = re.compile(
    r"validation/(pass_rate_(t1|greedy)(/.+)?|reward_(t1|greedy)|response_length|truncated|(avg|maj|pass|macro_avg)/.+)"
)


class ClusterConfig(Section):
    """Processes the recipe is meant for; null: however many are launched."""

    num_nodes: PositiveInt | None = key(None, "machines", "machines")
    gpus_per_node: PositiveInt | None = key(None, "processes on one machine (one a GPU)", "processes")
    hang_timeout_s: Annotated[float, Field(ge=1, le=604_800)] = key(
        1800.0,
        "a run in which nothing moves for so long ends with an error that names the rank that is behind and where it "
        "is: longer than any part of a step that gives no sign of life (docs/operations.md)",
        "s",
    )
