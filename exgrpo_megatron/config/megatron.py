"""The actor: parallel layout, optimiser and learning rate."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.section import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Section, key


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
    lr_warmup_iters: Count = key(0, "optimiser steps of linear warm-up from lr_warmup_init", "optimiser steps")
    lr_warmup_init: NonNegativeFloat = key(0.0, "learning rate of the first step of a warm-up")
    lr_decay_iters: PositiveInt | None = key(
        None, "optimiser steps until min_lr; null: the whole run", "optimiser steps"
    )

    def decay_steps(self, total_updates: int) -> int:
        """Optimiser steps until min_lr, warm-up included, in a run of so many."""
        steps = self.lr_decay_iters or total_updates
        return max(steps, self.lr_warmup_iters + 1) if self.lr_decay_style == "constant" else steps

    @model_validator(mode="after")
    def _begins_with_a_warm_up(self) -> SchedulerConfig:
        if self.lr_warmup_init and not self.lr_warmup_iters:
            raise ValueError(
                f"lr_warmup_init = {self.lr_warmup_init} has no effect with lr_warmup_iters = 0: set it to 0"
            )
        return self


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


class Fp8Config(Section):
    """FP8 in the matrix products of Transformer Engine's layers; embedding, output layer, attention stay bfloat16."""

    enabled: bool = key(False, "compute the layers' matrix products in FP8 (needs Transformer Engine's layers)")
    fp8: Literal["e4m3", "hybrid"] = key("e4m3", "e4m3 everywhere, or hybrid: e5m2 for gradients")
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8"] = key(
        "blockwise",
        "what has a scale of its own: blockwise: 128 numbers of a position, and 128 x 128 of a weight; tensorwise: a "
        "tensor, so that log-probs depend a little on what else is in the micro-batch; mxfp8: 32 numbers (delayed, "
        "with scales of earlier passes, is refused: log-probs would depend on these)",
    )
    fp8_param: bool = key(False, "keep the weights in FP8; refused: leave it false")

    @property
    def row_multiple(self) -> int:
        """Positions that the products on one rank see are a multiple of this; 1 without FP8."""
        return _FP8_POSITIONS[self.fp8_recipe] if self.enabled else 1

    @property
    def width_multiple(self) -> int:
        """Rows and columns of a weight on one rank must be multiples of this."""
        return 32 if self.fp8_recipe == "mxfp8" else 16

    @model_validator(mode="after")
    def _weights_stay_bfloat16(self) -> Fp8Config:
        if self.fp8_param:
            raise ValueError(
                "fp8_param = true is not supported: the optimizer's float32 weights would be those before the model "
                "was loaded, and exports would be rounded to FP8; leave it false"
            )
        return self


_FP8_POSITIONS = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""cuBLAS wants the contracted side of a product, which in a weight's gradient is the positions, in whole blocks."""


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
    transformer_impl: Literal["auto", "transformer_engine", "local"] = key(
        "auto",
        "whose layers: transformer_engine (refused where it cannot be used), local: Megatron's own, or auto: the first "
        "where there are a GPU, Transformer Engine and policy.precision = bfloat16, else the second",
    )
    apply_rope_fusion: bool | None = key(
        None, "rotate positions in one kernel of Transformer Engine; null: with its layers"
    )
    bias_activation_fusion: bool | None = key(
        None, "compile the activation into one kernel, with triton; null: with Transformer Engine's layers"
    )
    gradient_accumulation_fusion: bool | None = key(
        None,
        "add the gradients of the layers' weights to the float32 sum as they are made (needs Transformer Engine's "
        "layers or apex's extension); null: where it can be",
    )
    fp8_cfg: Fp8Config = key(Fp8Config(), "FP8")
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
        tensor-parallel ranks with sequence parallelism, and FP8 wants whole blocks of what is left."""
        shares = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_multiple, self.context_parallel_size * shares * self.fp8_cfg.row_multiple)

    @model_validator(mode="after")
    def _no_experts(self) -> MegatronConfig:
        if self.expert_model_parallel_size != 1:
            raise ValueError(
                f"expert_model_parallel_size = {self.expert_model_parallel_size}, but models with experts are not "
                "supported: leave it 1"
            )
        return self

    @model_validator(mode="after")
    def _fp8_needs_its_layers(self) -> MegatronConfig:
        if self.fp8_cfg.enabled and self.transformer_impl == "local":
            raise ValueError(
                "fp8_cfg.enabled = true needs Transformer Engine's layers, but transformer_impl = local: set it to "
                "auto or transformer_engine, or fp8_cfg.enabled to false"
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
