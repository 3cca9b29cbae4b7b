"""The loss from given logits, whose gradient takes their place."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from exgrpo_kernels import statistics
from exgrpo_kernels.dispatch import row_kernels
from exgrpo_kernels.linear import check_targets
from exgrpo_kernels.reference import Objective
from exgrpo_kernels.types import Columns, FusedLoss, LossInputs


def logits_loss(
    logits: Float[Tensor, "tokens columns"], columns: Columns, inputs: LossInputs, objective: Objective
) -> FusedLoss:
    """The loss of the tokens, with the exact gradient of the logits, of which no copy is made.

    The logits are handed over: afterwards they hold their gradient, in their own dtype. Statistics are float32
    (float64 of float64), but a caller who rounded the logits to 16 bits has rounded the log-probs with them.

    Raises:
        RuntimeError: a target is not below `columns.valid_vocab`.
        ValueError: the temperature or the vocabulary is out of range.
    """
    check_targets(inputs.targets, columns.valid_vocab)
    loss, *reported = _LogitsLoss.apply(logits, columns, inputs, objective, torch.is_grad_enabled())
    return FusedLoss(loss, *reported)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, columns: Columns, inputs: LossInputs, objective: Objective, wanted: bool
    ) -> tuple[Tensor, ...]:
        kernels, values = row_kernels(logits), logits.detach()
        layout = columns.layout(logits.shape[1])
        partials = statistics.gather(kernels.row_statistics(values, inputs.targets, **layout), columns.group)
        wanted = wanted and ctx.needs_input_grad[0]
        results = kernels.loss_and_gradient(
            values, partials, inputs.targets, inputs, objective, **layout, write_gradient=wanted
        )
        ctx.gradient = values if wanted else None
        reported = results.logprobs, results.entropies, results.log_ratio, results.clipped, results.clamped
        ctx.mark_non_differentiable(*reported)
        ctx.set_materialize_grads(False)
        return results.loss.sum(), *reported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("a fused loss hands its gradients out once: it has no second backward pass")
        gradient, ctx.gradient = ctx.gradient, None
        given = None if upstream is None else gradient.mul_(upstream)
        return given, None, None, None, None
