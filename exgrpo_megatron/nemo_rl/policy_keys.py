"""The keys of NeMo-RL's section `policy`: the model, its layout, and the rollouts."""

from __future__ import annotations

from exgrpo_megatron.nemo_rl import rules
from exgrpo_megatron.nemo_rl.verdicts import Row, by, left, only, renamed, same

_EXPERTS = "models with experts are not supported"
SPEED = "speed or memory, not the result"
ENGINE = "of an engine or transport that is not used here"
LOGGER = "not written here; metrics.jsonl and TensorBoard are"
_PORTS = "no servers are started"
_MULTI_TOKEN = "no heads for further tokens are trained"
_QUANT = "quantised training and rollouts are not supported"
_ENVIRONMENT = "variables are not set by a recipe"
_MODULE = "the attention, norm and loss are chosen by shape and GPU"

POLICY: dict[str, Row] = {
    **dict.fromkeys(
        (
            "policy.model_name",
            "policy.train_global_batch_size",
            "policy.max_total_sequence_length",
            "policy.precision",
            "policy.logprob_chunk_size",
            "policy.max_grad_norm",
            "policy.sequence_packing.enabled",
            "policy.dynamic_batching.enabled",
        ),
        same(),
    ),
    "policy.tokenizer.name": by("`null` where it is the model's", rules.tokenizer_name),
    "policy.tokenizer.chat_template_kwargs": only(None, {}, reason="the chat template gets the messages alone"),
    "policy.tokenizer.chat_template_kwargs.*": only(
        reason="the chat template gets the messages alone", instead="policy.tokenizer.chat_template_kwargs=null"
    ),
    "policy.tokenizer.use_fastokens": left(SPEED),
    "policy.hf_config_overrides": only(
        None, {}, reason="the model is that of its folder", instead="edit config.json in policy.model_name"
    ),
    "policy.hf_config_overrides.*": only(
        reason="the model is that of its folder",
        instead="edit config.json in policy.model_name, and policy.hf_config_overrides=null",
    ),
    "policy.train_micro_batch_size": by("where micro-batches go by it", rules.micro_batch),
    "policy.logprob_batch_size": by("where micro-batches go by it", rules.micro_batch),
    "policy.generation_batch_size": left("policy.generation.max_batch_size bounds the batch"),
    "policy.offload_optimizer_for_logprob": left(SPEED),
    "policy.refit_buffer_size_gb": left("policy.generation.vllm_cfg.update_weights_bucket_megabytes is that"),
    "policy.dtensor_cfg.enabled": only(False, reason="the actor is Megatron-Core"),
    "policy.dtensor_cfg.*": left("the actor is Megatron-Core"),
    "policy.fsdp_offload_enabled": left("the actor is Megatron-Core"),
    "policy.activation_checkpointing_enabled": left("the actor is Megatron-Core"),
    "policy.optimizer": left("policy.megatron_cfg.optimizer is used"),
    "policy.optimizer.*": left("policy.megatron_cfg.optimizer is used"),
    "policy.scheduler": left("policy.megatron_cfg.scheduler is used"),
    "policy.draft.enabled": only(False, reason="no draft model is trained"),
    "policy.draft.*": left("no draft model is trained"),
    "policy.router_replay.enabled": only(False, reason=_EXPERTS),
    "policy.router_replay.*": left(_EXPERTS),
    **dict.fromkeys(
        (
            "policy.quant_cfg",
            "policy.quant_calib_data",
            "policy.quant_calib_size",
            "policy.quant_batch_size",
            "policy.quant_sequence_length",
        ),
        only(None, reason=_QUANT),
    ),
    "policy.disable_modelopt_layer_spec": left(_QUANT),
    "policy.sequence_packing.algorithm": by("`first_fit_decreasing`", rules.packing_algorithm),
    "policy.sequence_packing.microbatch_order": left(SPEED),
    "policy.sequence_packing.sequence_length_round": left("only what the parallel layout needs is padded"),
    "policy.sequence_packing.fuse_loss": left(SPEED),
    "policy.sequence_packing.*": by("where it is enabled", rules.packing),
    "policy.dynamic_batching.*": by("where it is enabled", rules.packing),
    "policy.make_sequence_length_divisible_by": left("lengths are padded to what the parallel layout needs"),
}

_ACTOR = "policy.megatron_cfg."
MEGATRON: dict[str, Row] = {
    **{
        f"{_ACTOR}{name}": same()
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "sequence_parallel",
            "activation_checkpointing",
            "optimizer.optimizer",
            "optimizer.lr",
            "optimizer.min_lr",
            "optimizer.weight_decay",
            "optimizer.adam_beta1",
            "optimizer.adam_beta2",
            "optimizer.adam_eps",
            "optimizer.use_distributed_optimizer",
            "scheduler.lr_decay_style",
            "distributed_data_parallel_config.overlap_grad_reduce",
            "distributed_data_parallel_config.overlap_param_gather",
            "fp8_cfg.enabled",
            "fp8_cfg.fp8",
            "fp8_cfg.fp8_recipe",
            "fp8_cfg.fp8_param",
        )
    },
    f"{_ACTOR}enabled": only(True, reason="the actor is Megatron-Core"),
    f"{_ACTOR}expert_model_parallel_size": only(1, reason=_EXPERTS, instead="another model"),
    f"{_ACTOR}expert_tensor_parallel_size": only(1, reason=_EXPERTS, instead="another model"),
    **dict.fromkeys(
        (f"{_ACTOR}apply_rope_fusion", f"{_ACTOR}bias_activation_fusion", f"{_ACTOR}gradient_accumulation_fusion"),
        by("`null` for `true`: where Transformer Engine's layers are used", rules.fusion),
    ),
    f"{_ACTOR}scheduler.lr_warmup_iters": by("training steps, here optimiser steps", rules.per_update),
    f"{_ACTOR}scheduler.lr_decay_iters": by("training steps, here optimiser steps", rules.per_update),
    f"{_ACTOR}scheduler.lr_warmup_init": by("where there is a warm-up", rules.warmup_init),
    f"{_ACTOR}scheduler.start_weight_decay": by(
        "unless equal to `weight_decay`", rules.weight_decay_schedule, "refused"
    ),
    f"{_ACTOR}scheduler.end_weight_decay": by("unless equal to `weight_decay`", rules.weight_decay_schedule, "refused"),
    f"{_ACTOR}scheduler.weight_decay_incr_style": only("constant", reason="the weight decay does not change in a run"),
    f"{_ACTOR}optimizer.clip_grad": by("`policy.max_grad_norm`; refused where they differ", rules.clip_grad),
    f"{_ACTOR}optimizer.bf16": by("`policy.precision`; refused where they differ", rules.bf16),
    f"{_ACTOR}optimizer.fp16": only(False, reason="weights are float32 or bfloat16"),
    f"{_ACTOR}optimizer.params_dtype": left("the optimiser's weights are float32"),
    f"{_ACTOR}optimizer.sgd_momentum": left("of another optimiser"),
    f"{_ACTOR}optimizer.use_precision_aware_optimizer": left("the optimiser's state is float32"),
    f"{_ACTOR}optimizer.optimizer_*": left(SPEED),
    f"{_ACTOR}optimizer.overlap_cpu_optimizer_d2h_h2d": left(SPEED),
    f"{_ACTOR}distributed_data_parallel_config.grad_reduce_in_fp32": left("gradients are summed in float32"),
    f"{_ACTOR}distributed_data_parallel_config.use_custom_fsdp": left(SPEED),
    f"{_ACTOR}distributed_data_parallel_config.data_parallel_sharding_strategy": left("of FSDP alone"),
    f"{_ACTOR}model_overrides": only(None, {}, reason="the model is that of its folder"),
    f"{_ACTOR}model_overrides.*": only(
        reason="the model is that of its folder", instead=f"{_ACTOR}model_overrides=null"
    ),
    f"{_ACTOR}env_vars": only(None, {}, reason=_ENVIRONMENT),
    f"{_ACTOR}env_vars.*": only(reason=_ENVIRONMENT, instead=f"{_ACTOR}env_vars=null, and set them where you launch"),
    f"{_ACTOR}peft.enabled": only(False, reason="all weights are trained"),
    f"{_ACTOR}peft.*": left("all weights are trained"),
    f"{_ACTOR}mtp_num_layers": only(0, None, reason=_MULTI_TOKEN),
    f"{_ACTOR}mtp_*": left(_MULTI_TOKEN),
    f"{_ACTOR}freeze_config.*": left("there is no vision tower"),
    f"{_ACTOR}freeze_moe_router": left(_EXPERTS),
    f"{_ACTOR}moe_*": left(_EXPERTS),
    f"{_ACTOR}track_moe_metrics": left(_EXPERTS),
    f"{_ACTOR}train_iters": left("NeMo-RL sets it itself, from the steps of the run"),
    f"{_ACTOR}scheduler.override_opt_param_scheduler": left("of NeMo-RL's checkpoints"),
    f"{_ACTOR}distributed_data_parallel_config.average_in_collective": left("gradients are summed in float32"),
    **dict.fromkeys(
        (
            f"{_ACTOR}do_not_average_loss",
            f"{_ACTOR}cp_normalize",
            f"{_ACTOR}calculate_per_token_loss",
            f"{_ACTOR}scale_loss_by_dp_cp_size",
        ),
        only(None, reason="what the loss is divided by is loss_fn.normalizer"),
    ),
    f"{_ACTOR}checkpoint.async_save": by("`checkpointing.async_save`", renamed("checkpointing.async_save").judge),
    f"{_ACTOR}checkpoint.*": left("of NeMo-RL's checkpoints"),
    f"{_ACTOR}force_reconvert_from_hf": left("weights are read from the Hugging Face folder each time"),
    f"{_ACTOR}converter_type": left("the model is known by its config.json"),
    f"{_ACTOR}pipeline_dtype": left("policy.precision decides"),
    f"{_ACTOR}defer_fp32_logits": left(SPEED),
    f"{_ACTOR}attention_backend": left(_MODULE),
    f"{_ACTOR}use_fused_linear_logprobs": left(_MODULE),
    f"{_ACTOR}fused_linear_logprobs_chunk_size": left(_MODULE),
    f"{_ACTOR}use_fused_weighted_squared_relu": left(_MODULE),
    **{
        f"{_ACTOR}{name}": left(SPEED)
        for name in (
            "empty_unused_memory_level",
            "cuda_graph_*",
            "fine_grained_activation_offloading",
            "offload_modules",
            "recompute_granularity",
            "recompute_modules",
            "use_gloo_process_groups",
        )
    },
}

_ROLLOUTS = "policy.generation."
GENERATION: dict[str, Row] = {
    **{
        f"{_ROLLOUTS}{name}": same()
        for name in (
            "max_new_tokens",
            "temperature",
            "stop_token_ids",
            "vllm_cfg.tensor_parallel_size",
            "vllm_cfg.gpu_memory_utilization",
            "vllm_cfg.max_model_len",
            "vllm_cfg.enforce_eager",
            "vllm_cfg.enable_prefix_caching",
        )
    },
    f"{_ROLLOUTS}backend": by("`vllm` or `embedded`; others are refused", rules.backend),
    f"{_ROLLOUTS}top_p": only(1, reason="recorded log-probs need the whole distribution"),
    f"{_ROLLOUTS}top_k": only(None, -1, reason="recorded log-probs need the whole distribution"),
    f"{_ROLLOUTS}val_temperature": renamed("eval.temperature"),
    f"{_ROLLOUTS}val_top_p": only(1, reason="evaluations sample from the whole distribution"),
    f"{_ROLLOUTS}val_top_k": only(None, -1, reason="evaluations sample from the whole distribution"),
    f"{_ROLLOUTS}stop_strings": only(None, reason="a response ends with a token (policy.generation.stop_token_ids)"),
    f"{_ROLLOUTS}colocated.*": left("training and rollouts share all processes"),
    f"{_ROLLOUTS}port_range_*": left(_PORTS),
    f"{_ROLLOUTS}refit_*": left(ENGINE),
    f"{_ROLLOUTS}mcore_generation_config.*": left(ENGINE),
    f"{_ROLLOUTS}dynamo_cfg.*": left(ENGINE),
    f"{_ROLLOUTS}trtllm_cfg.*": left(ENGINE),
    f"{_ROLLOUTS}trtllm_kwargs.*": left(ENGINE),
    f"{_ROLLOUTS}real_quant_export_cpu_offload": left(_QUANT),
    f"{_ROLLOUTS}real_quant": only(False, None, reason=_QUANT),
    f"{_ROLLOUTS}real_quant_ignore": left(_QUANT),
    f"{_ROLLOUTS}quant_cfg": only(None, reason=_QUANT),
    f"{_ROLLOUTS}vllm_kwargs": only(None, {}, reason="the engine has the keys of vllm_cfg alone"),
    f"{_ROLLOUTS}vllm_kwargs.*": only(
        reason="the engine has the keys of vllm_cfg alone", instead=f"{_ROLLOUTS}vllm_kwargs=null"
    ),
    f"{_ROLLOUTS}vllm_cfg.precision": by("`float32` or `bfloat16`; others are refused", rules.engine_precision),
    f"{_ROLLOUTS}vllm_cfg.async_engine": left("rollouts and training take turns"),
    f"{_ROLLOUTS}vllm_cfg.kv_cache_dtype": only("auto", reason="it is that of the engine's weights"),
    f"{_ROLLOUTS}vllm_cfg.logprobs_mode": only(
        "processed_logprobs", reason="recorded log-probs are those of the temperature"
    ),
    f"{_ROLLOUTS}vllm_cfg.pipeline_parallel_size": only(1, reason="engines are tensor parallel at most"),
    f"{_ROLLOUTS}vllm_cfg.expert_parallel_size": only(1, reason=_EXPERTS),
    f"{_ROLLOUTS}vllm_cfg.enable_expert_parallel": only(False, reason=_EXPERTS),
    f"{_ROLLOUTS}vllm_cfg.is_mx": only(False, reason=_QUANT),
    f"{_ROLLOUTS}vllm_cfg.quantization_ignored_layer_kws": left(_QUANT),
    f"{_ROLLOUTS}vllm_cfg.use_deep_gemm": left("of FP8 rollouts, which are refused"),
    f"{_ROLLOUTS}vllm_cfg.num_*_layers_in_bf16": left("of FP8 rollouts, which are refused"),
    f"{_ROLLOUTS}vllm_cfg.use_tqdm": left(LOGGER),
    f"{_ROLLOUTS}vllm_cfg.enable_vllm_metrics_logger": left(LOGGER),
    f"{_ROLLOUTS}vllm_cfg.vllm_metrics_logger_interval": left(LOGGER),
    f"{_ROLLOUTS}vllm_cfg.expose_http_server": left(_PORTS),
    f"{_ROLLOUTS}vllm_cfg.http_server_*": left(_PORTS),
    f"{_ROLLOUTS}vllm_cfg.reasoning_parser_plugin": left(_PORTS),
    f"{_ROLLOUTS}vllm_cfg.enforce_monotonicity": left(_PORTS),
    f"{_ROLLOUTS}vllm_cfg.skip_tokenizer_init": left("the engine sees token ids only"),
    f"{_ROLLOUTS}vllm_cfg.enable_thinking": only(None, reason="the chat template gets the messages alone"),
    f"{_ROLLOUTS}vllm_cfg.*_refit_*": left(_PORTS),
    f"{_ROLLOUTS}vllm_cfg.reset_encoder_cache_after_weight_update": left("models are of text alone"),
    f"{_ROLLOUTS}vllm_cfg.env_vars": only(None, {}, reason=_ENVIRONMENT),
    f"{_ROLLOUTS}vllm_cfg.env_vars.*": only(
        reason=_ENVIRONMENT, instead=f"{_ROLLOUTS}vllm_cfg.env_vars=null, and set them where you launch"
    ),
}
