"""The whole recipe, and the rules over several of its sections."""

from __future__ import annotations

import re
from typing import Any

from pydantic import model_validator

from exgrpo_megatron.config.data import DataConfig
from exgrpo_megatron.config.debug import DebugConfig
from exgrpo_megatron.config.demonstrations import DemonstrationsConfig
from exgrpo_megatron.config.experience import ExperienceConfig
from exgrpo_megatron.config.loggers import LoggerConfig
from exgrpo_megatron.config.objective import (
    VARIANTS,
    GRPOConfig,
    LossConfig,
    VariantName,
    whole_share,
)
from exgrpo_megatron.config.policy import PolicyConfig
from exgrpo_megatron.config.repo import RepoConfig
from exgrpo_megatron.config.rollouts import MIN_VLLM_TEMPERATURE
from exgrpo_megatron.config.run import CheckpointConfig, ClusterConfig, EnvConfig, EvalConfig, SFTConfig
from exgrpo_megatron.config.section import Section, key
from exgrpo_megatron.config.strategy import STRATEGY_SWITCHES, check_size, check_strategy


class Config(Section):
    """A whole recipe, resolved: no switch is left at `None`."""

    variant: VariantName = key("corrected", "sets every switch on which the paper and its released code differ")
    grpo: GRPOConfig = key(GRPOConfig(), "steps and groups")
    loss_fn: LossConfig = key(LossConfig(), "objective")
    experience: ExperienceConfig = key(ExperienceConfig(), "experience replay")
    demonstrations: DemonstrationsConfig = key(DemonstrationsConfig(), "worked solutions as members of groups")
    repo: RepoConfig = key(RepoConfig(), "replay without management (RePO)")
    data: DataConfig = key(..., "questions")
    policy: PolicyConfig = key(..., "the model")
    sft: SFTConfig = key(SFTConfig(), "supervised fine-tuning")
    env: EnvConfig = key(EnvConfig(), "rewards")
    eval: EvalConfig = key(EvalConfig(), "evaluation")
    checkpointing: CheckpointConfig = key(CheckpointConfig(), "checkpoints")
    logger: LoggerConfig = key(LoggerConfig(), "metrics")
    debug: DebugConfig = key(DebugConfig(), "bad steps")
    cluster: ClusterConfig = key(ClusterConfig(), "processes")

    @model_validator(mode="before")
    @classmethod
    def _fill_variant(cls, raw: Any) -> Any:
        return fill_variant(raw) if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _lengths_fit(self) -> Config:
        prompt, response = self.data.max_input_seq_length, self.policy.generation.max_new_tokens
        total = self.policy.max_total_sequence_length
        if prompt + response > total:
            raise ValueError(
                f"data.max_input_seq_length + policy.generation.max_new_tokens = {prompt} + {response} is more than "
                f"policy.max_total_sequence_length = {total}: raise this, or lower one of the others"
            )
        return self

    @model_validator(mode="after")
    def _penalty_can_happen(self) -> Config:
        buffer, longest = self.grpo.reward_shaping.overlong_buffer_length, self.policy.generation.max_new_tokens
        if not self.grpo.reward_shaping.enabled or buffer is None:
            return self
        begins = self.penalised_at - buffer
        if not 0 <= begins < longest:
            raise ValueError(
                f"grpo.reward_shaping: max_response_length - overlong_buffer_length = {self.penalised_at} - {buffer} = "
                f"{begins} must be from 0 to below policy.generation.max_new_tokens = {longest}: the penalty begins "
                "after that many tokens"
            )
        return self

    @model_validator(mode="after")
    def _one_source_of_off_policy_answers(self) -> Config:
        sources: dict[str, DemonstrationsConfig | RepoConfig | ExperienceConfig]
        sources = {"demonstrations": self.demonstrations, "repo": self.repo, "experience": self.experience}
        given = [f"{name}.enabled = true" for name, section in sources.items() if section.enabled]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)}: off-policy answers come from one of them; set the others to false"
            )
        if given and self.loss_fn.disable_ppo_ratio:
            raise ValueError(
                f"loss_fn.disable_ppo_ratio = true, but {given[0]}: off-policy answers need their ratio; set one of "
                "them to false (experience.shaping = 'log_prob' takes it from replayed answers alone)"
            )
        return self

    @model_validator(mode="after")
    def _bonus_is_of_new_answers(self) -> Config:
        if self.repo.enabled and self.loss_fn.entropy_bonus == "per_micro_batch":
            raise ValueError(
                "loss_fn.entropy_bonus = 'per_micro_batch', but repo.enabled = true: the off-policy groups, which have "
                "no entropy bonus, would be in the means; set it to 'global_mean' or 'none'"
            )
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> Config:
        generation = self.policy.generation
        if generation.backend != "vllm":
            return self
        prompt, length = self.data.max_input_seq_length, self.max_model_len
        if prompt + generation.max_new_tokens > length:
            raise ValueError(
                f"data.max_input_seq_length + policy.generation.max_new_tokens = {prompt} + "
                f"{generation.max_new_tokens} is more than policy.generation.vllm_cfg.max_model_len = {length}"
            )
        for name, temperature in (
            ("policy.generation.temperature", generation.temperature),
            ("eval.temperature", self.eval.temperature),
            *((f"eval.sets.{name}.temperature", self.eval.temperature_of(name)) for name in self.eval.sets),
        ):
            if 0 < temperature < MIN_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{name} = {temperature}: policy.generation.backend = 'vllm' samples at {MIN_VLLM_TEMPERATURE} "
                    "instead of anything lower; raise it, or use the embedded engine"
                )
        return self

    @model_validator(mode="after")
    def _warm_start_has_solutions(self) -> Config:
        source = self.sft.data or self.data.train
        if self.sft.warm_start and source.has_rows and source.solution_key is None:
            name = "sft.data" if self.sft.data else "data.train"
            raise ValueError(
                f"sft.warm_start = true, but {name}.solution_key is null: a warm start needs worked solutions; set it, "
                f"or sft.data to other questions with solutions, or sft.warm_start = false"
            )
        return self

    @model_validator(mode="after")
    def _categories_are_known(self) -> Config:
        source = self.data.train
        if self.experience.difficulty_per_category and source.has_rows and source.category_key is None:
            raise ValueError(
                "experience.difficulty_per_category = true, but data.train.category_key is null: set it to the column "
                "with the category, or experience.difficulty_per_category = false"
            )
        return self

    @model_validator(mode="after")
    def _solved_is_more_than_correct(self) -> Config:
        above = self.experience.solved_above
        if above is not None and self.env.reward_function is None:
            raise ValueError(
                f"experience.solved_above = {above} has no effect without env.reward_function: other rewards are 0 or "
                "1; set it to null"
            )
        if above is not None and above <= self.env.correct_above:
            raise ValueError(
                f"experience.solved_above = {above} is not above env.correct_above = {self.env.correct_above}, and has "
                "no effect: solved questions have correct answers only; raise it, or set it to null"
            )
        return self

    @model_validator(mode="after")
    def _one_beginning(self) -> Config:
        if self.policy.init_from is not None and self.sft.warm_start:
            raise ValueError(
                f"policy.init_from = {self.policy.init_from!r}, but sft.warm_start = true: the weights of one would "
                "be lost; set policy.init_from to null, or sft.warm_start to false"
            )
        return self

    @model_validator(mode="after")
    def _best_metric_is_measured(self) -> Config:
        name = self.checkpointing.metric_name
        if self.data.validation and not self.eval.greedy and re.match(r"validation/(pass_rate|reward)_greedy", name):
            raise ValueError(
                f"eval.greedy = false, but checkpointing.metric_name = {name!r} is measured by greedy decoding: set "
                f"checkpointing.metric_name to {name.replace('greedy', 't1', 1)!r}, or eval.greedy = true"
            )
        if name.startswith("validation/reward_") and self.env.reward_function is None:
            raise ValueError(
                f"checkpointing.metric_name = {name!r} is measured with env.reward_function alone: set it to "
                f"{name.replace('reward', 'pass_rate', 1)!r}"
            )
        return self

    @model_validator(mode="after")
    def _best_metric_of_a_set_is_measured(self) -> Config:
        name, measured = self.checkpointing.metric_name, self.eval.training_metrics
        if re.match(r"validation/(avg|maj|pass|macro_avg)/", name) and name not in measured:
            raise ValueError(
                f"checkpointing.metric_name = {name!r} is not measured in training; of eval.sets with in_training = "
                f"true these are: {', '.join(measured) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _whole_groups_a_minibatch(self) -> Config:
        prompts, members = self.grpo.num_prompts_per_step, self.grpo.num_generations_per_prompt
        batch = self.policy.train_global_batch_size
        if batch % members:
            raise ValueError(
                f"policy.train_global_batch_size = {batch} is not a multiple of "
                f"grpo.num_generations_per_prompt = {members} (groups are not split)"
            )
        if (prompts * members) % batch:
            raise ValueError(
                f"grpo.num_prompts_per_step * grpo.num_generations_per_prompt = {prompts} * {members} is not a "
                f"multiple of policy.train_global_batch_size = {batch}"
            )
        return self

    @model_validator(mode="after")
    def _strategy_has_its_keys(self) -> Config:
        check_strategy(self.variant, self.experience, self.loss_fn)
        members = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        check_size(self.experience.replay_step, members, self.updates_per_step)
        return self

    @model_validator(mode="after")
    def _schedules_fit(self) -> Config:
        megatron, sft = self.policy.megatron_cfg, self.sft
        for section, optimizer, scheduler, total in (
            ("policy.megatron_cfg", megatron.optimizer, megatron.scheduler, self.total_updates),
            ("sft", sft.optimizer, sft.scheduler, sft.max_num_steps),
        ):
            warmup, decay = scheduler.lr_warmup_iters, scheduler.decay_steps(total)
            if warmup >= decay:
                raise ValueError(
                    f"{section}.scheduler.lr_warmup_iters = {warmup} must be below the {decay} optimiser steps "
                    f"of the decay ({section}.scheduler.lr_decay_iters = {scheduler.lr_decay_iters}, whole run = "
                    f"{total})"
                )
            for name, rate in (
                ("optimizer.min_lr", optimizer.min_lr),
                ("scheduler.lr_warmup_init", scheduler.lr_warmup_init),
            ):
                if rate > optimizer.lr:
                    raise ValueError(
                        f"{section}.{name} = {rate} must not be above {section}.optimizer.lr = {optimizer.lr}"
                    )
        return self

    @property
    def penalised_at(self) -> int:
        """Tokens from which an answer gets the whole penalty of `grpo.reward_shaping`."""
        return self.grpo.reward_shaping.max_response_length or self.policy.generation.max_new_tokens

    @property
    def max_model_len(self) -> int:
        """Longest prompt + response of the vLLM engine."""
        return self.policy.generation.vllm_cfg.max_model_len or self.policy.max_total_sequence_length

    @property
    def engine_precision(self) -> str:
        """Numbers of the vLLM engine's weights."""
        return self.policy.generation.vllm_cfg.precision or self.policy.precision

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the whole run, replay steps included; a training step with nothing stored has none of
        these, so that a run may take fewer."""
        return self.grpo.max_num_steps * (self.updates_per_step + self.replay_steps_per_step)

    @property
    def replay_steps_per_step(self) -> int:
        """Optimiser steps on stored answers a training step, once there are any."""
        step = self.experience.replay_step
        return step.num_steps if self.experience.in_steps and not step.joint else 0

    @property
    def max_replay_step_answers(self) -> int:
        """Stored answers of a replay step when experience has enough questions: floor(size x B x K)."""
        members = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        return whole_share(self.experience.replay_step.size, members) if self.experience.in_steps else 0

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps on new answers a training step."""
        return self.grpo.num_iterations * self.updates_per_pass

    @property
    def updates_per_pass(self) -> int:
        """Optimiser steps of one pass over the answers of a training step."""
        sequences = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        return sequences // self.policy.train_global_batch_size

    @property
    def max_replayed_per_step(self) -> int:
        """Replayed questions of a step when experience has enough."""
        experience = self.experience
        return whole_share(experience.replay_ratio, self.grpo.num_prompts_per_step) if experience.in_groups else 0

    def variant_table(self) -> dict[str, Any]:
        """The switches of `VARIANTS` as they are in force, by dotted key."""
        return {name: getattr(getattr(self, name.split(".")[0]), name.split(".")[1]) for name in VARIANTS}


def fill_variant(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` with every switch that is absent or null set to the variant's value, or the strategy's if it has one."""
    variant = raw.get("variant", Config.model_fields["variant"].default)
    filled = dict(raw)
    by_strategy = _strategy_switches(raw.get("experience"))
    for name, of_variant in VARIANTS.items():
        values = {known: by_strategy.get(name, value) for known, value in of_variant.items()}
        section, switch = name.split(".")
        given = filled.get(section, {})
        if isinstance(variant, str) and variant in values and isinstance(given, dict) and given.get(switch) is None:
            filled[section] = {**given, switch: values[variant]}
    return filled


def _strategy_switches(experience: Any) -> dict[str, Any]:
    strategy = experience.get("strategy") if isinstance(experience, dict) else None
    return STRATEGY_SWITCHES.get(strategy, {}) if isinstance(strategy, str) else {}
