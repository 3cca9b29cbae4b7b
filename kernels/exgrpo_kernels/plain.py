"""The reference form: all logits at once, and autograd of the definition, for comparison with the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo_kernels.reference import Objective, logprob_entropy, token_terms
from exgrpo_kernels.torch_kernels import statistics_dtype
from exgrpo_kernels.types import FusedLoss, LossInputs, OutputHead


def plain_loss(hidden: Tensor, head: OutputHead, inputs: LossInputs, objective: Objective) -> FusedLoss:
    """See `fused.token_loss`."""
    logprobs, entropies = plain_logprobs(hidden, head, inputs.targets)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    loss = (inputs.policy_weights * terms.policy_loss).sum()
    if inputs.entropy_weights is not None:
        loss = loss - (inputs.entropy_weights * entropies).sum()
    return FusedLoss(loss, logprobs.detach(), entropies.detach(), terms.log_ratio, terms.clipped, terms.clamped)


def plain_logprobs(hidden: Tensor, head: OutputHead, targets: Tensor) -> tuple[Tensor, Tensor]:
    """See `fused.logprobs`."""
    # 16-bit weights are multiplied in float32, so that the logits are no coarser than in the other forms.
    dtype = statistics_dtype(head.weight.dtype)
    if head.reduce_hidden_grad and head.group is not None:
        hidden = _SumGradient.apply(hidden, head.group)
    weight = head.weight.to(dtype)
    if head.main_grad is not None:
        weight = _AddToMainGrad.apply(head.weight, dtype, head.main_grad)
    return logprob_entropy(
        hidden.to(dtype) @ weight.t(),
        targets,
        temperature=head.temperature,
        valid_vocab=head.valid_vocab,
        group=head.group,
        vocab_start=head.vocab_start,
    )


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _AddToMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, main_grad: Tensor) -> Tensor:
        ctx.main_grad, ctx.like = main_grad, weight.dtype
        return weight.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.main_grad.add_(gradient)
        return torch.zeros_like(gradient, dtype=ctx.like), None, None
