"""What a wrong key or value of a recipe is answered with."""

from __future__ import annotations

import difflib
from typing import Any

from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.verl_keys import verl_advice

NEMO_RL_ADVICE = {
    "cluster.segment_size": "leave it out; placement is the launcher's",
    "grpo.adv_estimator": "use grpo.normalize_rewards and grpo.use_leave_one_out_baseline",
    "grpo.async_grpo": "leave it out; rollouts and training take turns",
    "grpo.batch_multiplier": "leave it out; use grpo.num_prompts_per_step",
    "grpo.max_num_epochs": "use grpo.max_num_steps",
    "grpo.max_val_samples": "use data.validation.max_questions",
    "grpo.reward_scaling": "leave it out; a function of yours may scale (env.reward_function)",
    "grpo.reward_shaping.stop_properly_penalty_coef": "use grpo.overlong_filtering or the other keys of reward_shaping",
    "grpo.use_dynamic_sampling": "leave it out; experience.replay_ratio raises the share of mixed groups",
    "grpo.val_batch_size": "leave it out; policy.generation.max_batch_size bounds the batch",
    "logger.mlflow.run_id": "leave it out; a run goes on with the MLflow run it began",
    "logger.monitor_gpus": "leave it out; W&B watches the machine by itself",
    "logger.swanlab_enabled": "leave it out; use logger.wandb_enabled or logger.mlflow_enabled",
    "loss_fn.reference_policy_kl_penalty": "leave it out; ExGRPO has no reference model",
    "loss_fn.sequence_level_importance_ratios": "leave it out; loss_fn.rollout_is is the level of the correction alone",
    "loss_fn.token_level_loss": "use loss_fn.normalizer",
    "data.max_input_seq_len": "use data.max_input_seq_length",
    "data.dataset_name": "use data.train.path",
    "data.train_data_path": "use data.train.path",
    "data.val_data_path": "use data.validation.path",
    "policy.dtensor_cfg": "leave it out; the actor is Megatron-Core (policy.megatron_cfg)",
    "policy.generation.colocated": "leave it out; training and rollouts share the processes",
    "policy.generation.top_k": "leave it out; recorded log-probs need the whole distribution",
    "policy.generation.top_p": "leave it out; recorded log-probs need the whole distribution",
    "policy.generation.vllm_cfg.async_engine": "leave it out; rollouts and training take turns",
    "policy.generation.vllm_cfg.expert_parallel_size": "leave it out; models with experts are not supported",
    "policy.generation.vllm_cfg.kv_cache_dtype": "leave it out; it is that of the engine's weights",
    "policy.generation.vllm_cfg.load_format": "leave it out; the engine's weights come from the actor",
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_cfg.pipeline_parallel_size": "leave it out; engines are tensor parallel at most",
    "policy.generation.vllm_cfg.skip_tokenizer_init": "leave it out; the engine sees token ids only",
    "policy.generation.vllm_cfg.use_deep_gemm": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_kwargs": "use the keys of policy.generation.vllm_cfg",
    "policy.make_sequence_length_divisible_by": "leave it out; lengths are padded to what the parallel layout needs",
    "policy.hf_config_overrides": "edit config.json in policy.model_name",
    "policy.megatron_cfg.enabled": "leave it out; the actor is always Megatron-Core",
    "policy.megatron_cfg.expert_tensor_parallel_size": "leave it out; models with experts are not supported",
    "policy.megatron_cfg.attention_backend": "leave it out; Transformer Engine chooses by shape and GPU",
    "policy.megatron_cfg.bias_dropout_fusion": "leave it out; there is neither a bias nor dropout to fuse",
    "policy.megatron_cfg.fp8_cfg.force_clear_fp8_caches": "leave it out; nothing is moved off the GPU for rollouts",
    "policy.megatron_cfg.masked_softmax_fusion": "leave it out; neither attention has a masked softmax of its own",
    "policy.megatron_cfg.persist_layer_norm": "leave it out; it is for layer norms of apex, and norms here are RMSNorm",
    "policy.megatron_cfg.pipeline_dtype": "leave it out; it is policy.precision",
    "policy.sequence_packing.sequence_length_round": "leave it out; only what the parallel layout needs is padded",
    "policy.optimizer": "use policy.megatron_cfg.optimizer",
    "policy.scheduler": "use policy.megatron_cfg.scheduler",
    "policy.megatron_cfg.optimizer.clip_grad": "use policy.max_grad_norm",
    "sft.max_num_epochs": "use sft.max_num_steps",
}
"""Keys NeMo-RL users may bring that have no place here, with what to do instead."""


def explain(item: Any) -> str:
    """One pydantic error as `key = value: rule`."""
    dotted = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown_key(dotted)
    if item["type"] == "missing":
        return f"{dotted}: required, but not set"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{dotted}: {message}" if dotted else message
    if item["type"] == "string_type" and isinstance(item["input"], dict):
        message += "; a text in braces needs quotes"
    meaning = next((option.meaning for option in options() if option.name == dotted), "")
    return f"{dotted} = {shown(item['input'])}: {message}{f' ({meaning})' if meaning else ''}"


def shown(value: Any) -> str:
    """A value as a message quotes it, cut where it is long."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"(a {type(value).__name__})"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _unknown_key(dotted: str) -> str:
    for name, advice in NEMO_RL_ADVICE.items():
        if dotted == name or dotted.startswith(name + "."):
            return f"{dotted}: not a key of this recipe: {advice}"
    if of_verl := verl_advice(dotted):
        return f"{dotted}: not a key of this recipe: {of_verl}"
    known = [option.name for option in options()]
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.0)
    same_leaf = [name for name in known if name.split(".")[-1] == dotted.split(".")[-1]]
    hint = same_leaf[0] if same_leaf else near[0]
    return f"{dotted}: unknown key; nearest: {hint} (all keys: exgrpo options)"
