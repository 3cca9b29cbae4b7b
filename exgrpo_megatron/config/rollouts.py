"""The rollout engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.section import Count, PositiveFloat, PositiveInt, Section, Temperature, key

MIN_VLLM_TEMPERATURE = 0.01


class AgreementConfig(Section):
    """Whether engine and actor give the same tokens the same log-probs: compared before the first step and later."""

    period: Count = key(10, "steps between comparisons after the one before the first step; 0: only that one", "steps")
    num_prompts: PositiveInt = key(8, "questions of the step sampled anew for a comparison, on each rank", "questions")
    max_abs_difference: PositiveFloat | None = key(
        None, "largest difference of a log-prob; null: 1e-3 in float32, 0.3 in bfloat16", "nats"
    )
    max_mean_difference: PositiveFloat | None = key(
        None, "largest mean difference; null: 1e-4 in float32, 0.03 in bfloat16", "nats"
    )
    max_kl: PositiveFloat | None = key(
        None, "largest estimate of KL(engine, actor) a token; null: 1e-5 in float32, 1e-2 in bfloat16", "nats"
    )
    action: Literal["stop", "warn"] = key("stop", "beyond a limit: end the run with a message, or warn and count")

    def limits(self, precision: str) -> tuple[float, float, float]:
        """Largest, mean and KL limit in force for weights of `precision` ("float32" or "bfloat16")."""
        largest, mean, kl = (1e-3, 1e-4, 1e-5) if precision == "float32" else (0.3, 0.03, 1e-2)
        return self.max_abs_difference or largest, self.max_mean_difference or mean, self.max_kl or kl


class VllmConfig(Section):
    """The vLLM engine (policy.generation.backend: vllm)."""

    precision: Literal["float32", "bfloat16"] | None = key(
        None, "numbers of the engine's weights; null: policy.precision"
    )
    tensor_parallel_size: PositiveInt = key(1, "ranks that share one engine; 1: every rank has its own", "ranks")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = key(
        0.6, "share of a GPU's memory for the engine, where kv_cache_memory_bytes is null"
    )
    kv_cache_memory_bytes: PositiveInt | None = key(
        None, "memory of the key-value cache on one rank; null: by gpu_memory_utilization, on CPUs 256 MiB", "bytes"
    )
    max_model_len: PositiveInt | None = key(
        None, "longest prompt + response; null: policy.max_total_sequence_length", "tokens"
    )
    enforce_eager: bool = key(True, "neither CUDA graphs nor compilation: starts sooner, samples slower on GPUs")
    enable_prefix_caching: bool = key(True, "compute a prompt once for all of its answers (whole blocks of it)")
    separate_process: bool = key(
        False, "run the engine beside each rank in a process of its own, of which a crash is survived"
    )
    update_weights_bucket_megabytes: PositiveInt = key(
        256, "weights are handed over in pieces of this size, or of the largest tensors that belong together", "MB"
    )
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = key(
        1200.0, "time for one rollout; an engine that takes longer is built anew and samples again", "s"
    )
    max_restarts: Count = key(2, "how often in a run a failed engine is built anew before the run ends", "restarts")
    agreement: AgreementConfig = key(AgreementConfig(), "comparison with the actor")

    @model_validator(mode="after")
    def _one_process_an_engine(self) -> VllmConfig:
        if self.separate_process and self.tensor_parallel_size > 1:
            raise ValueError(
                f"separate_process = true, but tensor_parallel_size = {self.tensor_parallel_size}: ranks share an "
                "engine only inside their own processes; set one of them back"
            )
        return self


class GenerationConfig(Section):
    """Rollouts."""

    backend: Literal["embedded", "vllm"] = key(
        "embedded", "embedded: batched KV-cache sampling in torch; vllm: vLLM in the processes of the trainer"
    )
    max_new_tokens: PositiveInt = key(96, "longest response; longer ones are truncated and counted", "tokens")
    temperature: Temperature = key(1.0, "sampling temperature of training rollouts")
    stop_token_ids: Annotated[tuple[Count, ...], Field(min_length=1)] | None = key(
        None, "tokens that end a response; null: those of the model's generation config and the tokenizer"
    )
    max_batch_size: PositiveInt = key(256, "responses sampled at once on one rank", "responses")
    vllm_cfg: VllmConfig = key(VllmConfig(), "vLLM")
