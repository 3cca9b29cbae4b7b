"""The whole recipe schema: every key, default, unit, meaning and check.

Names follow NeMo-RL where they mean the same; `experience:` and `variant:` are ours. `None` as the default of a
switch means "as the variant says" (`VARIANTS`); the values in force are printed at start and saved with the run.
Loading and overriding recipes is `recipe.py`.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What torch's generators take."""
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
Name = Annotated[str, Field(min_length=1)]
"""Of a file, folder, column or the like."""
MIN_VLLM_TEMPERATURE = 0.01

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


class Section(BaseModel):
    """Frozen; unknown keys are refused, and so is `true` or `false` where a number is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        # Python's True is an int, and pydantic would read it as 1.
        given = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in given):
            admitted = _leaf_types(cls.model_fields[info.field_name or ""].annotation)
            if admitted & {int, float} and bool not in admitted:
                raise PydanticCustomError("bool_for_number", "Input should be a number, not true or false")
        return value


def _leaf_types(annotation: Any) -> set[type]:
    """The plain types an annotation is made of; a literal counts as the type of its values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) is Annotated:
        return _leaf_types(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        return {annotation}
    return {leaf for part in get_args(annotation) for leaf in _leaf_types(part)}


def key(default: Any, meaning: str, unit: str = "") -> Any:
    """A recipe key with its default, meaning and unit (shown by `exgrpo options`)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit})


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


class DataSourceConfig(Section):
    """One set of questions: a file, or a generator."""

    path: Name | None = key(None, "JSONL or Parquet file with one question a row", "path")
    generator: Literal["chain_arithmetic"] | None = key(None, "embedded task instead of a file")
    generator_size: PositiveInt = key(400, "questions to generate", "questions")
    generator_seed: Seed = key(0, "seed of the generated questions")
    generator_difficulties: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1)] = key(
        (2, 3, 4, 5, 6), "numbers of terms in a generated chain"
    )
    question_key: Name = key("question", "column with the question")
    answer_key: Name = key("answer", "column with the gold answer")
    answer_marker: Name | None = key(None, "take the gold answer after the last occurrence of this (GSM8K: '####')")
    id_key: Name | None = key(None, "column with a unique id; null: a hash of the question text")
    category_key: Name | None = key(None, "column with a category to report pass rates by")
    solution_key: Name | None = key(None, "column with a worked solution (supervised fine-tuning, `exgrpo prefill`)")
    solution_remove: str | None = key(
        None, "regular expression: what it matches is cut from solutions (GSM8K: <<.*?>>)"
    )
    max_questions: PositiveInt | None = key(None, "use only the first questions of the set", "questions")

    @model_validator(mode="after")
    def _one_source(self) -> DataSourceConfig:
        if (self.path is None) == (self.generator is None):
            rule = f"set exactly one of path ({self.path!r}) and generator ({self.generator!r})"
            raise ValueError(f"{rule}; generator: null beside a path replaces a generator" if self.path else rule)
        return self

    @field_validator("solution_remove")
    @classmethod
    def _is_regular_expression(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value


class DataConfig(Section):
    """Questions, and how they become prompts."""

    train: DataSourceConfig = key(..., "training questions")
    validation: DataSourceConfig | None = key(None, "held-out questions")
    system_prompt: str | None = key(None, "system message put before every question")
    prompt_template: str = key("{question}", "user message; {question} is replaced")
    max_input_seq_length: PositiveInt = key(512, "longer prompts are dropped, counted and reported", "tokens")
    epoch_order: Literal["reshuffle", "same"] | None = key(
        None, "order of the questions in later epochs; null: as the variant says"
    )

    @model_validator(mode="after")
    def _template_has_question(self) -> DataConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template must contain {{question}}, found {self.prompt_template!r}")
        return self


class OptimizerConfig(Section):
    """AdamW, through Megatron's optimizer."""

    optimizer: Literal["adam"] = key("adam", "AdamW")
    lr: Annotated[float, Field(gt=0, le=10)] = key(1e-6, "peak learning rate")
    min_lr: NonNegativeFloat = key(0.0, "learning rate at the end of a decay")
    weight_decay: NonNegativeFloat = key(0.01, "decoupled weight decay")
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = key(0.9, "decay of the first moment")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = key(0.999, "decay of the second moment")
    adam_eps: PositiveFloat = key(1e-8, "added to the root of the second moment")


class SchedulerConfig(Section):
    """Learning rate over optimiser steps."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = key("constant", "shape after the warm-up")
    lr_warmup_iters: Count = key(0, "optimiser steps of linear warm-up from 0", "optimiser steps")
    lr_decay_iters: PositiveInt | None = key(
        None, "optimiser steps until min_lr; null: the whole run", "optimiser steps"
    )

    def decay_steps(self, total_updates: int) -> int:
        """Optimiser steps until min_lr, warm-up included, in a run of so many."""
        steps = self.lr_decay_iters or total_updates
        return max(steps, self.lr_warmup_iters + 1) if self.lr_decay_style == "constant" else steps


class MegatronOptimizerConfig(OptimizerConfig):
    """AdamW of the RL steps, and how its state is kept (that of supervised steps is kept alike)."""

    use_distributed_optimizer: bool = key(
        False, "share the optimiser's state and the float32 weights out among data- and context-parallel ranks (ZeRO-1)"
    )


class DistributedDataParallelConfig(Section):
    """What data-parallel ranks exchange while they compute."""

    overlap_grad_reduce: bool = key(False, "sum gradients over data-parallel ranks during the backward pass")
    overlap_param_gather: bool = key(
        False,
        "gather updated weights during the next forward pass (needs overlap_grad_reduce and "
        "optimizer.use_distributed_optimizer)",
    )
    bucket_size: PositiveInt | None = key(
        None,
        "parameters whose gradients travel together (needs overlap_grad_reduce, without which all do); null: 40 "
        "million, or one million a data-parallel rank where that is more",
        "parameters",
    )

    @model_validator(mode="after")
    def _buckets_need_overlap(self) -> DistributedDataParallelConfig:
        if self.bucket_size is not None and not self.overlap_grad_reduce:
            raise ValueError(
                f"bucket_size = {self.bucket_size}, but overlap_grad_reduce = false: all gradients travel together "
                "then; leave it null"
            )
        return self


class MegatronConfig(Section):
    """Parallel layout and optimiser of the Megatron-Core actor; the processes left over are data parallel."""

    tensor_model_parallel_size: PositiveInt = key(1, "ranks that share every weight matrix", "ranks")
    pipeline_model_parallel_size: PositiveInt = key(1, "pipeline stages, which share the layers", "ranks")
    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = key(
        None,
        "chunks of layers on every stage, which micro-batches pass through in turn (interleaved schedule: stages idle "
        "less and send more); null: one",
        "chunks",
    )
    context_parallel_size: PositiveInt = key(1, "ranks that share the positions of every sequence", "ranks")
    expert_model_parallel_size: PositiveInt = key(
        1, "ranks that share experts; 1, for models with experts are refused", "ranks"
    )
    sequence_parallel: bool = key(
        False, "tensor-parallel ranks also share the positions outside attention and MLP (less memory)"
    )
    num_layers_in_first_pipeline_stage: PositiveInt | None = key(
        None, "layers of the first stage; null: as many as the others", "layers"
    )
    num_layers_in_last_pipeline_stage: PositiveInt | None = key(
        None, "layers of the last stage; null: as many as the others", "layers"
    )
    activation_checkpointing: bool = key(
        False, "keep only each layer's input of the forward pass, and compute the rest again in the backward pass"
    )
    distributed_data_parallel_config: DistributedDataParallelConfig = key(
        DistributedDataParallelConfig(), "exchange between data-parallel ranks"
    )
    optimizer: MegatronOptimizerConfig = key(MegatronOptimizerConfig(), "optimiser")
    scheduler: SchedulerConfig = key(SchedulerConfig(), "learning-rate schedule")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def chunks(self) -> int:
        """Parts of the model on every pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def sequence_multiple(self) -> int:
        """Positions of a packed sequence are a multiple of this: context-parallel ranks get two equal parts each."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """Positions of a row are a multiple of this: its part on a context-parallel rank is shared out once more among
        tensor-parallel ranks with sequence parallelism."""
        shares = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_multiple, self.context_parallel_size * shares)

    @model_validator(mode="after")
    def _no_experts(self) -> MegatronConfig:
        if self.expert_model_parallel_size != 1:
            raise ValueError(
                f"expert_model_parallel_size = {self.expert_model_parallel_size}, but models with experts are not "
                "supported: leave it 1"
            )
        return self

    @model_validator(mode="after")
    def _sequence_needs_tensor_parallel(self) -> MegatronConfig:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel = true shares positions among tensor-parallel ranks, but "
                "tensor_model_parallel_size = 1: leave it false, or raise that"
            )
        return self

    @model_validator(mode="after")
    def _chunks_need_stages(self) -> MegatronConfig:
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size = {self.virtual_pipeline_model_parallel_size} cuts pipeline "
                "stages into chunks, but pipeline_model_parallel_size = 1: leave it null, or raise that"
            )
        return self

    @model_validator(mode="after")
    def _uneven_stages_need_stages(self) -> MegatronConfig:
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(self, name) is not None and self.pipeline_model_parallel_size == 1:
                raise ValueError(
                    f"{name} = {getattr(self, name)}, but pipeline_model_parallel_size = 1: the only stage has all "
                    f"layers; leave it null"
                )
        return self

    @model_validator(mode="after")
    def _param_gather_needs_shared_state(self) -> MegatronConfig:
        overlap = self.distributed_data_parallel_config
        if overlap.overlap_param_gather and not (
            overlap.overlap_grad_reduce and self.optimizer.use_distributed_optimizer
        ):
            raise ValueError(
                "distributed_data_parallel_config.overlap_param_gather = true needs distributed_data_parallel_config."
                f"overlap_grad_reduce = true (it is {overlap.overlap_grad_reduce}) and "
                f"optimizer.use_distributed_optimizer = true (it is {self.optimizer.use_distributed_optimizer})"
            )
        return self


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


class DynamicBatchingConfig(Section):
    """Micro-batches of as many padded rows as a number of positions admits."""

    enabled: bool = key(False, "micro-batches by train_mb_tokens and logprob_mb_tokens instead of sequences")
    train_mb_tokens: PositiveInt | None = key(
        None, "rows x longest row of a forward-backward, at most; null: policy.max_total_sequence_length", "positions"
    )
    logprob_mb_tokens: PositiveInt | None = key(
        None, "rows x longest row of a forward-only pass, at most; null: policy.max_total_sequence_length", "positions"
    )
    sequence_length_round: PositiveInt = key(
        1, "rows are padded to a multiple of this, for fewer different shapes", "positions"
    )


class SequencePackingConfig(Section):
    """Micro-batches of one row, in which sequences follow one another with no padding between them."""

    enabled: bool = key(False, "pack sequences up to train_mb_tokens and logprob_mb_tokens instead of padding them")
    train_mb_tokens: PositiveInt | None = key(
        None, "positions of a forward-backward, at most; null: policy.max_total_sequence_length", "positions"
    )
    logprob_mb_tokens: PositiveInt | None = key(
        None, "positions of a forward-only pass, at most; null: policy.max_total_sequence_length", "positions"
    )
    algorithm: Literal["first_fit_decreasing", "best_fit_decreasing"] = key(
        "first_fit_decreasing",
        "from the longest sequence down, each goes into the first pack with room, or into the one with the least room",
    )


class TokenizerConfig(Section):
    """Tokenizer and chat template."""

    name: Name | None = key(None, "folder of the tokenizer; null: policy.model_name", "path")


class PolicyConfig(Section):
    """The model that is trained."""

    model_name: Name = key(..., "Hugging Face model folder, or embedded:chain-qwen2 (0.4M, made on the spot)", "path")
    tokenizer: TokenizerConfig = key(TokenizerConfig(), "tokenizer")
    train_global_batch_size: PositiveInt = key(256, "sequences of one optimiser step", "sequences")
    train_micro_batch_size: PositiveInt | None = key(
        None,
        "sequences of one forward-backward on one rank; null: 64, or by a token budget",
        "sequences",
    )
    logprob_batch_size: PositiveInt | None = key(
        None,
        "sequences of one forward-only pass on one rank; null: 128, or by a token budget",
        "sequences",
    )
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig(), "padded micro-batches by a token budget")
    sequence_packing: SequencePackingConfig = key(SequencePackingConfig(), "packed micro-batches by a token budget")
    max_total_sequence_length: PositiveInt = key(608, "longest prompt + response", "tokens")
    precision: Literal["float32", "bfloat16"] = key("float32", "numbers of the weights in forward and backward")
    max_grad_norm: PositiveFloat = key(1.0, "gradients are scaled down to this global L2 norm")
    skip_grad_norm_above: PositiveFloat = key(
        500.0, "an optimiser step whose norm is above this, or whose norm or loss is not finite, is skipped and counted"
    )
    megatron_cfg: MegatronConfig = key(MegatronConfig(), "Megatron-Core")
    generation: GenerationConfig = key(GenerationConfig(), "rollouts")

    @property
    def token_budget(self) -> DynamicBatchingConfig | SequencePackingConfig | None:
        """The section in force that counts positions; None: micro-batches are so many sequences."""
        return next((section for section in (self.dynamic_batching, self.sequence_packing) if section.enabled), None)

    def mb_sequences(self, *, train: bool) -> int:
        """Sequences of a micro-batch, where no token budget is in force."""
        return (self.train_micro_batch_size or 64) if train else (self.logprob_batch_size or 128)

    def mb_tokens(self, *, train: bool) -> int:
        """Positions of a micro-batch at most, padding included, of all context-parallel ranks together."""
        section = self.token_budget
        if section is None:
            return self.mb_sequences(train=train) * self.longest_row
        return (section.train_mb_tokens if train else section.logprob_mb_tokens) or self.longest_row

    @property
    def padded_to(self) -> int:
        """Positions of a row are a multiple of this."""
        return math.lcm(
            self.megatron_cfg.row_multiple,
            self.dynamic_batching.sequence_length_round if self.dynamic_batching.enabled else 1,
        )

    @property
    def longest_row(self) -> int:
        """Positions of a row with one sequence of the greatest length."""
        return -(-self.max_total_sequence_length // self.padded_to) * self.padded_to

    @model_validator(mode="after")
    def _one_rule_for_micro_batches(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled = true and sequence_packing.enabled = true: a micro-batch is padded or "
                "packed; leave one of them false"
            )
        name = "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"
        for key in ("train_micro_batch_size", "logprob_batch_size"):
            if self.token_budget is not None and getattr(self, key) is not None:
                raise ValueError(
                    f"{key} = {getattr(self, key)} has no effect with {name}.enabled = true, which fills micro-batches "
                    f"up to {name}.train_mb_tokens and logprob_mb_tokens: set policy.{key} to null, or {name}.enabled "
                    "to false"
                )
        return self

    @model_validator(mode="after")
    def _longest_sequence_fits(self) -> PolicyConfig:
        section = self.token_budget
        name = "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            budget = getattr(section, key, None)
            if budget is not None and budget < self.longest_row:
                padded = f", padded to a multiple of {self.padded_to}" if self.padded_to > 1 else ""
                raise ValueError(
                    f"{name}.{key} = {budget} has no room for one sequence of max_total_sequence_length = "
                    f"{self.max_total_sequence_length} tokens ({self.longest_row} positions{padded}): raise it, or "
                    "lower that"
                )
        return self


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
    """Math-Verify rewards."""

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


class EnvConfig(Section):
    """Where rewards come from."""

    math: MathEnvConfig = key(MathEnvConfig(), "Math-Verify")


class EvalConfig(Section):
    """Evaluation on the validation set, during training and by `exgrpo eval`."""

    num_tests_per_prompt: PositiveInt = key(1, "samples a question at eval.temperature", "answers")
    temperature: Temperature = key(1.0, "temperature of the sampled pass rate")
    greedy: bool = key(True, "also measure greedy decoding")
    seed: Seed = key(123, "seed of the samples")


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
    metric_name: str = key(
        "validation/pass_rate_greedy",
        "the checkpoint best in this is kept too: validation/pass_rate_t1 or validation/pass_rate_greedy, of one "
        "category with /<category> behind it, validation/response_length, or validation/truncated; without "
        "data.validation no checkpoint is the best",
    )
    higher_is_better: bool = key(True, "direction of metric_name")
    export_hf: bool = key(True, "write <logger.log_dir>/hf at the end, checked against the trainer")

    @field_validator("metric_name")
    @classmethod
    def _metric_is_measured(cls, value: str) -> str:
        if not _VALIDATION_METRIC.fullmatch(value):
            raise PydanticCustomError("metric", "Input should be a metric of the evaluations")
        return value


_VALIDATION_METRIC = re.compile(r"validation/(pass_rate_(t1|greedy)(/.+)?|response_length|truncated)")


class LoggerConfig(Section):
    """What is written while training."""

    log_dir: Name = key("runs/default", "folder of the run", "path")
    tensorboard_enabled: bool = key(True, "write TensorBoard events beside metrics.jsonl")


class ClusterConfig(Section):
    """Processes the recipe is meant for; null: however many are launched."""

    num_nodes: PositiveInt | None = key(None, "machines", "machines")
    gpus_per_node: PositiveInt | None = key(None, "processes on one machine (one a GPU)", "processes")


class Config(Section):
    """A whole recipe, resolved: no switch is left at `None`."""

    variant: VariantName = key("corrected", "sets every switch on which the paper and its released code differ")
    grpo: GRPOConfig = key(GRPOConfig(), "steps and groups")
    loss_fn: LossConfig = key(LossConfig(), "objective")
    experience: ExperienceConfig = key(ExperienceConfig(), "experience replay")
    data: DataConfig = key(..., "questions")
    policy: PolicyConfig = key(..., "the model")
    sft: SFTConfig = key(SFTConfig(), "supervised fine-tuning")
    env: EnvConfig = key(EnvConfig(), "rewards")
    eval: EvalConfig = key(EvalConfig(), "evaluation")
    checkpointing: CheckpointConfig = key(CheckpointConfig(), "checkpoints")
    logger: LoggerConfig = key(LoggerConfig(), "metrics")
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
                f"policy.max_total_sequence_length = {total}"
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
        ):
            if temperature < MIN_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{name} = {temperature}: policy.generation.backend = 'vllm' samples at {MIN_VLLM_TEMPERATURE} "
                    "instead of anything lower; raise it, or use the embedded engine"
                )
        return self

    @model_validator(mode="after")
    def _warm_start_has_solutions(self) -> Config:
        source = self.sft.data or self.data.train
        if self.sft.warm_start and source.path is not None and source.solution_key is None:
            name = "sft.data" if self.sft.data else "data.train"
            raise ValueError(
                f"sft.warm_start = true, but {name}.solution_key is null: a warm start needs worked solutions; set it, "
                f"or sft.data to other questions with solutions, or sft.warm_start = false"
            )
        return self

    @model_validator(mode="after")
    def _best_metric_is_measured(self) -> Config:
        name = self.checkpointing.metric_name
        if self.data.validation and not self.eval.greedy and name.startswith("validation/pass_rate_greedy"):
            raise ValueError(
                f"eval.greedy = false, but checkpointing.metric_name = {name!r} is measured by greedy decoding: set "
                f"checkpointing.metric_name to {name.replace('greedy', 't1', 1)!r}, or eval.greedy = true"
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
    def _schedules_fit(self) -> Config:
        megatron, sft = self.policy.megatron_cfg, self.sft
        for key, optimizer, scheduler, total in (
            ("policy.megatron_cfg", megatron.optimizer, megatron.scheduler, self.total_updates),
            ("sft", sft.optimizer, sft.scheduler, sft.max_num_steps),
        ):
            warmup, decay = scheduler.lr_warmup_iters, scheduler.decay_steps(total)
            if warmup >= decay:
                raise ValueError(
                    f"{key}.scheduler.lr_warmup_iters = {warmup} must be below the {decay} optimiser steps "
                    f"of the decay ({key}.scheduler.lr_decay_iters = {scheduler.lr_decay_iters}, whole run = {total})"
                )
            if optimizer.min_lr > optimizer.lr:
                raise ValueError(
                    f"{key}.optimizer.min_lr = {optimizer.min_lr} must not be above {key}.optimizer.lr = {optimizer.lr}"
                )
        return self

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
        """Optimiser steps of the whole run."""
        return self.grpo.max_num_steps * self.updates_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps a training step."""
        sequences = self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
        return sequences // self.policy.train_global_batch_size

    @property
    def max_replayed_per_step(self) -> int:
        """Replayed questions of a step when experience has enough."""
        experience = self.experience
        return whole_share(experience.replay_ratio, self.grpo.num_prompts_per_step) if experience.enabled else 0

    def variant_table(self) -> dict[str, Any]:
        """The switches of `VARIANTS` as they are in force, by dotted key."""
        return {name: getattr(getattr(self, name.split(".")[0]), name.split(".")[1]) for name in VARIANTS}


def whole_share(share: float, count: int) -> int:
    """`floor(share * count)`, with the share taken as the decimal it was written as.

    In binary floating point 0.29 * 100 is 28.999...; a recipe that says 0.29 of 100 means 29.
    """
    return math.floor(Fraction(str(share)) * count)


def fill_variant(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` with every switch that is absent or null set to the variant's value."""
    variant = raw.get("variant", Config.model_fields["variant"].default)
    filled = dict(raw)
    for name, values in VARIANTS.items():
        section, switch = name.split(".")
        given = filled.get(section, {})
        if isinstance(variant, str) and variant in values and isinstance(given, dict) and given.get(switch) is None:
            filled[section] = {**given, switch: values[variant]}
    return filled
