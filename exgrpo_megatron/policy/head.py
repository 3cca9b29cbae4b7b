"""The output layer of the model's last stage, as the loss takes it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state as mpu

from exgrpo_kernels.fused import OutputHead
from exgrpo_megatron.policy.model import ResponseModel


def output_head(model: ResponseModel, vocab_size: int, temperature: float) -> OutputHead:
    """The output layer of `model`, which has the end of a last stage and is wrapped for data parallelism.

    `vocab_size`: without padding. Gradients of weights in lower precision are added to Megatron's float32 buffer as
    they are made; autograd would round those of every micro-batch to the weights' precision first.
    """
    weight: Any = model.output_weight  # Megatron gives it further attributes
    shared = mpu.get_tensor_model_parallel_world_size() > 1
    add_in_float32 = weight.dtype != torch.float32
    if add_in_float32 and not getattr(weight, "zero_out_wgrad", False):
        # Megatron's word for: its hook need not add the zeros that autograd sees. To an embedding that is used at both
        # ends of this stage (it has the other mark) autograd brings the gradient of the other end, which must be added.
        weight.grad_added_to_main_grad = True
    return OutputHead(
        weight=weight,
        valid_vocab=vocab_size,
        vocab_start=mpu.get_tensor_model_parallel_rank() * weight.shape[0],
        group=mpu.get_tensor_model_parallel_group() if shared else None,
        # With sequence parallelism the gather of the positions does it in its backward pass.
        reduce_hidden_grad=shared and not model.config.sequence_parallel,
        temperature=temperature,
        main_grad=weight.main_grad if add_in_float32 else None,
    )
