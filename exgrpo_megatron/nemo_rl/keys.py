"""Every key of NeMo-RL's published GRPO configurations for Megatron: taken, converted, left out or refused."""

from __future__ import annotations

from fnmatch import fnmatchcase

from exgrpo_megatron.nemo_rl import data_rules, rules
from exgrpo_megatron.nemo_rl.policy_keys import ENGINE, GENERATION, LOGGER, MEGATRON, POLICY, SPEED
from exgrpo_megatron.nemo_rl.verdicts import Row, by, left, only, renamed, same

_COLUMN = "taken with data_path; elsewhere question_key and answer_key of the source name the columns"
_KL = "there is no KL term"

_GRPO: dict[str, Row] = {
    **dict.fromkeys(
        (
            "grpo.num_prompts_per_step",
            "grpo.num_generations_per_prompt",
            "grpo.max_num_steps",
            "grpo.val_at_start",
            "grpo.overlong_filtering",
            "grpo.seed",
            "grpo.reward_shaping.enabled",
        ),
        same(),
    ),
    "grpo.max_num_epochs": by("unless `null`: a run ends after `grpo.max_num_steps`", rules.epochs, "refused"),
    **dict.fromkeys(
        (
            "grpo.normalize_rewards",
            "grpo.use_leave_one_out_baseline",
            "grpo.adv_estimator.normalize_rewards",
            "grpo.adv_estimator.use_leave_one_out_baseline",
        ),
        by("those of `grpo.adv_estimator` where both are given", rules.estimator),
    ),
    "grpo.adv_estimator.name": only("grpo", reason="advantages are those of GRPO"),
    "grpo.adv_estimator.minus_baseline": left("of Reinforce++ alone"),
    "grpo.val_period": by("below 0: 0", rules.val_period),
    "grpo.val_start_at": left("evaluations begin with the first period"),
    "grpo.val_at_end": left("the last step is always evaluated"),
    "grpo.max_val_samples": by("`data.validation.max_questions`", rules.max_val_samples),
    "grpo.val_num_generations_per_prompt": renamed("eval.num_tests_per_prompt"),
    "grpo.val_batch_size": left("policy.generation.max_batch_size bounds the batch"),
    "grpo.stop_at_validation_metric": only(None, reason="a run ends after grpo.max_num_steps"),
    "grpo.stop_at_validation_threshold": only(None, reason="a run ends after grpo.max_num_steps"),
    "grpo.max_rollout_turns": only(1, reason="a rollout is one answer"),
    "grpo.advantage_clip_low": only(None, reason="advantages are not clipped"),
    "grpo.advantage_clip_high": only(None, reason="advantages are not clipped"),
    "grpo.use_dynamic_sampling": only(False, reason="groups without an advantage are not sampled again"),
    "grpo.dynamic_sampling_max_gen_batches": left("groups are not sampled again"),
    "grpo.batch_multiplier": left("groups are not sampled again"),
    "grpo.reward_shaping.stop_properly_penalty_coef": only(None, reason="only the penalty of the buffer is built"),
    "grpo.reward_shaping.*": by("where `grpo.reward_shaping.enabled`", rules.reward_shaping),
    "grpo.reward_scaling.enabled": only(False, reason="rewards are not scaled"),
    "grpo.reward_scaling.*": left("rewards are not scaled"),
    "grpo.seq_logprob_error_threshold": only(None, reason="the agreement of engine and actor is checked instead"),
    "grpo.invalid_tool_call_advantage": only(None, reason="there are no tools"),
    "grpo.malformed_thinking_advantage": only(None, reason="answers are judged by their result"),
    "grpo.invalid_tool_call_strategy": only(None, reason="there are no tools"),
    "grpo.penalize_invalid_tool_call": only(False, None, reason="there are no tools"),
    "grpo.penalize_malformed_thinking": only(False, None, reason="answers are judged by their result"),
    "grpo.calculate_advantages_on_gpu": left(SPEED),
    "grpo.skip_reference_policy_logprobs_calculation": left("there is no reference model"),
    "grpo.async_grpo.enabled": only(False, reason="rollouts and training take turns"),
    "grpo.async_grpo.*": left("rollouts and training take turns"),
    "async_rl.*": only(reason="rollouts and training take turns", instead="async_rl=null"),
    "reward_penalties.token_ids": left("of penalties that are refused"),
    "reward_penalties.*": only(False, reason="rewards are those of the verifier"),
    "on_policy_distillation": only(None, reason="there are no teachers"),
    "on_policy_distillation.*": only(reason="there are no teachers", instead="on_policy_distillation=null"),
}

_LOSS: dict[str, Row] = {
    "loss_fn.reference_policy_kl_penalty": only(0, reason="ExGRPO has no KL term and no reference model"),
    **dict.fromkeys(
        (
            "loss_fn.reference_policy_kl_type",
            "loss_fn.kl_input_clamp_value",
            "loss_fn.kl_output_clamp_value",
            "loss_fn.use_on_policy_kl_approximation",
            "loss_fn.use_kl_in_reward",
        ),
        left(_KL),
    ),
    "loss_fn.ratio_clip_min": same(),
    "loss_fn.ratio_clip_max": same(),
    "loss_fn.ratio_clip_c": only(None, reason="the ratio is clipped once"),
    "loss_fn.disable_ppo_ratio": same(),
    "loss_fn.use_importance_sampling_correction": same(),
    **dict.fromkeys(
        (
            "loss_fn.truncated_importance_sampling_type",
            "loss_fn.truncated_importance_sampling_ratio",
            "loss_fn.truncated_importance_sampling_ratio_min",
        ),
        by("the same, but for `null`", rules.correction_limits),
    ),
    "loss_fn.sequence_level_importance_ratios": only(False, reason="the ratio is that of a token"),
    "loss_fn.token_level_loss": by(
        "`loss_fn.normalizer`: `global_tokens`, or `per_answer_length` for `false`", rules.token_level_loss
    ),
    "loss_fn.force_on_policy_ratio": by(
        "`true` changes nothing with one optimiser step a training step; else refused", rules.force_on_policy_ratio
    ),
    "loss_fn.use_cispo": only(False, reason="the objective is the clipped one"),
    "loss_fn.positive_example_nll_weight": only(0, reason="there is no such term"),
}

_SOURCES: dict[str, Row] = {}
for _section in ("data.train", "data.validation"):
    _SOURCES |= {
        _section: by("a list of data sets", data_rules.datasets, "refused"),
        f"{_section}.dataset_name": by(
            f"a data set of a hub: give `{_section}.path=FILE`", data_rules.dataset_name, "refused"
        ),
        f"{_section}.data_path": by(f"`{_section}.path`, with the columns", data_rules.data_path),
        f"{_section}.split_validation_size": by(
            "unless 0, or `data.validation.path` is given", data_rules.split_validation_size, "refused"
        ),
        f"{_section}.seed": left("of the split of a hub's data set"),
    }
for _section in ("data.train", "data.validation", "data.default", "data"):
    _SOURCES |= {
        f"{_section}.input_key": left(_COLUMN),
        f"{_section}.output_key": left(_COLUMN),
        f"{_section}.prompt_file": by("its text is `data.prompt_template`", data_rules.prompt_file),
        f"{_section}.system_prompt_file": by("its text is `data.system_prompt`", data_rules.system_prompt_file),
        f"{_section}.processor": only("math_hf_data_processor", None, reason="a question becomes one user message"),
        f"{_section}.env_name": only("math", None, reason="answers are judged by env.math or env.reward_function"),
    }

_HUB = "of a hub's data set"
_OLDER_SOURCES: dict[str, Row] = {
    "data.dataset_name": by(
        "a data set of a hub: give `data.train.path=FILE data.validation.path=FILE`",
        data_rules.older_dataset_name,
        "refused",
    ),
    "data.val_dataset_name": by(
        "a data set of a hub: give `data.validation.path=FILE`", data_rules.older_val_dataset_name, "refused"
    ),
    "data.train_data_path": by("`data.train.path`, with the columns", data_rules.older_data_path("data.train")),
    "data.val_data_path": by("`data.validation.path`, with the columns", data_rules.older_data_path("data.validation")),
    **dict.fromkeys(("data.split", "data.train_split", "data.val_split", "data.download_dir"), left(_HUB)),
    "data.seed": left("of the split of a hub's data set"),
}
"""Where NeMo-RL up to v0.5 has them: directly below `data`."""

_REST: dict[str, Row] = {
    "data.max_input_seq_length": by("the same; refused where prompt and response do not fit", rules.input_length),
    "data.shuffle": by("`true`: `data.epoch_order: reshuffle`; else refused", data_rules.shuffle),
    "data.num_workers": left(SPEED),
    "data.use_multiple_dataloader": only(False, reason="questions come from one file"),
    "data.default.dataset_name": left("data.train says where questions come from"),
    **_SOURCES,
    **_OLDER_SOURCES,
    "env.math.num_workers": by("of the run, here of one process", rules.num_workers),
    "env.math.math_verify_impl": only("hf_math_verify", reason="the verifier is Math-Verify"),
    "env.should_use_nemo_gym": only(False, None, reason="answers are judged by env.math or env.reward_function"),
    "env.should_*": left("of NeMo Gym, which is not used"),
    "env.nemo_gym.*": left("of NeMo Gym, which is not used"),
    "env.dapo.*": left("another environment than that of data.default.env_name"),
    "checkpointing.enabled": same(),
    "checkpointing.checkpoint_dir": same(),
    "checkpointing.save_period": same(),
    "checkpointing.higher_is_better": same(),
    "checkpointing.metric_name": by("`val:accuracy`, `val_reward`: `validation/pass_rate_t1`", rules.metric_name),
    "checkpointing.keep_top_k": by(
        "besides them the newest are kept; where `metric_name` is null: `checkpointing.keep_last_n`", rules.keep_top_k
    ),
    "checkpointing.ft_keep_latest_k": by("`checkpointing.keep_last_n`", rules.keep_latest),
    "checkpointing.checkpoint_must_save_by": left("a signal before the end of the time saves"),
    "checkpointing.model_save_format": left("of NeMo-RL's checkpoints"),
    "checkpointing.save_*": left("of NeMo-RL's checkpoints"),
    "logger.log_dir": same(),
    "logger.tensorboard_enabled": same(),
    **dict.fromkeys(("logger.wandb_enabled", "logger.mlflow_enabled"), same()),
    **dict.fromkeys(
        (
            "logger.wandb.project",
            "logger.wandb.name",
            "logger.wandb.entity",
            "logger.wandb.mode",
            "logger.mlflow.experiment_name",
            "logger.mlflow.run_name",
            "logger.mlflow.tracking_uri",
            "logger.mlflow.artifact_location",
        ),
        by("where the logger is enabled", rules.tool, "taken"),
    ),
    "logger.mlflow.run_id": only(None, reason="a run goes on with the MLflow run that it began"),
    "logger.wandb.log_nemo_gym_full_result_tables": left("of NeMo Gym, which is not used"),
    "logger.wandb.*": left("wandb's other settings have environment variables of wandb's"),
    **dict.fromkeys(
        (
            "logger.swanlab*",
            "logger.mlflow.*",
            "logger.tensorboard.*",
            "logger.monitor_gpus",
            "logger.gpu_monitoring.*",
            "logger.num_val_samples_to_print",
        ),
        left(LOGGER),
    ),
    "cluster.gpus_per_node": same(),
    "cluster.num_nodes": same(),
    "cluster.hang_timeout_s": same(),
    "cluster.*": left("placement is the launcher's"),
    "data_plane.*": left(ENGINE),
}

TABLE: dict[str, Row] = {**_GRPO, **_LOSS, **POLICY, **MEGATRON, **GENERATION, **_REST}
"""By dotted key; `*` stands for anything, and is asked after the keys without it, first come first served."""

FIXED: dict[str, tuple[object, str]] = {
    "experience.enabled": (False, "NeMo-RL's GRPO has no replay; experience.enabled=true makes it ExGRPO"),
    "loss_fn.entropy_bonus": ("none", "NeMo-RL's loss has none"),
    "loss_fn.entropy_coeff": (0.0, "NeMo-RL's loss has none"),
    "env.math.require_box": (False, "its verifier takes answers without \\boxed{} too"),
    "eval.greedy": (False, "it evaluates sampled answers alone"),
}
"""Ours that NeMo-RL has no key for, with the value that gives its result; the file or an override may say otherwise."""

_PATTERNS = [name for name in TABLE if "*" in name]


def row_of(key: str) -> Row | None:
    """The row for a key; None if it is none of NeMo-RL's."""
    if key in TABLE:
        return TABLE[key]
    return next((TABLE[pattern] for pattern in _PATTERNS if fnmatchcase(key, pattern)), None)


def holds_rows(section: str) -> bool:
    """Whether `section` is the name of a section of the table."""
    return any(name.startswith(section + ".") for name in TABLE)
