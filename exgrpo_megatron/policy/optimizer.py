"""Megatron's optimizer and learning-rate schedule, and the one step that applies a gradient or refuses it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, clip_grads, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from exgrpo_megatron.config import OptimizerConfig, PolicyConfig, SchedulerConfig


@dataclass(frozen=True)
class Step:
    """What one call of `apply_gradients` did."""

    grad_norm: float
    skipped: bool
    learning_rate: float


def build_optimizer(
    chunks: list[DistributedDataParallel], policy: PolicyConfig, config: OptimizerConfig
) -> MegatronOptimizer:
    """AdamW over every weight of the model's `chunks`; biases and norms are not decayed (Megatron's rule)."""
    bf16 = policy.precision == "bfloat16"
    exchange = chunks[0].ddp_config
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=config.optimizer,
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=policy.max_grad_norm,
            bf16=bf16,
            use_distributed_optimizer=exchange.use_distributed_optimizer,
            overlap_param_gather=exchange.overlap_param_gather,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
        ),
        chunks,
    )


def build_scheduler(
    optimizer: MegatronOptimizer, config: OptimizerConfig, scheduler: SchedulerConfig, total_updates: int
) -> OptimizerParamScheduler:
    """Learning rate as a function of the optimiser steps taken so far (lr_warmup_init at the first of a warm-up)."""
    decay_steps = scheduler.decay_steps(total_updates)
    assert scheduler.lr_warmup_iters < decay_steps, "Config refuses such a schedule"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=scheduler.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """Learning rate of the next optimiser step."""
    return float(optimizer.param_groups[0]["lr"])


def apply_gradients(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    *,
    loss: float,
    max_norm: float,
    skip_above: float,
    lr_multiplier: float = 1.0,
) -> Step:
    """Clip the gradients to `max_norm` and take one step; do nothing where the norm is above `skip_above`, or the norm
    or the `loss` is not finite.

    A skipped step leaves weights, optimizer state and schedule as they were. Every rank decides alike, because the
    norm is that of the whole, already reduced gradient, and the loss that of all ranks. The learning rate of this step
    alone is multiplied by `lr_multiplier`.
    """
    rate = learning_rate(optimizer) * lr_multiplier
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    # A ratio that is NaN shows in the loss alone with the reference kernel: autograd of the clamp gives it no gradient.
    if overflow or not math.isfinite(norm) or norm > skip_above or not math.isfinite(loss):
        return Step(grad_norm=norm, skipped=True, learning_rate=rate)
    if lr_multiplier != 1:  # the schedule sets them anew below
        for group in optimizer.param_groups:
            group["lr"] *= lr_multiplier
    clip_grads.clip_grad_by_total_norm_fp32(optimizer.get_parameters(), max_norm, norm)
    optimizer.step_with_ready_grads()
    scheduler.step(1)
    return Step(grad_norm=norm, skipped=False, learning_rate=rate)
