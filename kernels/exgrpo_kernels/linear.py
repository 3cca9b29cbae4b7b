"""From hidden states through the output layer, some tokens at a time: no logits beyond one chunk are ever kept.

`linear_loss` makes the gradients in the forward pass, where the loss is known: 3 products of a chunk, and one gather
over the ranks that share the vocabulary. `linear_logprobs` has the gradients of whatever is made of log-probs and
entropies, and computes the logits again for them: 4 products, and one gather in all. `linear_score` has no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from exgrpo_kernels import statistics
from exgrpo_kernels.chunks import Chunks, Gradients
from exgrpo_kernels.reference import Objective
from exgrpo_kernels.types import FusedLoss, LossInputs, OutputHead, TokenLoss


def linear_loss(
    hidden: Tensor, head: OutputHead, inputs: LossInputs, objective: Objective, *, chunk_rows: int
) -> FusedLoss:
    """See `fused.token_loss`."""
    check_targets(inputs.targets, head.valid_vocab)
    loss, *reported = _Loss.apply(hidden, head.weight, head, inputs, objective, chunk_rows, torch.is_grad_enabled())
    return FusedLoss(loss, *reported)


def linear_logprobs(hidden: Tensor, head: OutputHead, targets: Tensor, *, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """See `fused.logprobs`."""
    check_targets(targets, head.valid_vocab)
    logprobs, entropies = _Logprobs.apply(hidden, head.weight, head, targets, chunk_rows)
    return logprobs, entropies


def linear_score(hidden: Tensor, head: OutputHead, targets: Tensor, *, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """See `fused.score`."""
    chunks = Chunks(hidden, head.weight, head, chunk_rows)
    check_targets(targets, head.valid_vocab)
    return chunks.logprob_entropy(_all_statistics(chunks, targets))


def check_targets(targets: Tensor, valid_vocab: int) -> None:
    """Without a wait for a GPU. A rank cannot tell a target of another rank's from one of nobody's later on.

    Raises:
        RuntimeError: a target is not below `valid_vocab`.
    """
    if targets.is_cuda:
        torch._assert_async(((targets >= 0) & (targets < valid_vocab)).all(), "a target is not in the vocabulary")
    elif len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < valid_vocab:
        found = f"from {int(targets.min())} to {int(targets.max())}"
        raise RuntimeError(f"a target is not in the vocabulary: they must be in 0..{valid_vocab - 1}, found {found}")


class _Loss(torch.autograd.Function):
    """Keeps the gradients until the backward pass hands them out, which it can do once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: OutputHead,
        inputs: LossInputs,
        objective: Objective,
        chunk_rows: int,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        chunks = Chunks(hidden, weight, head, chunk_rows)
        needed = [wanted and needs for needs in ctx.needs_input_grad[:2]]
        gradients = Gradients(chunks, hidden=needed[0], weight=needed[1])
        results = TokenLoss.joined([_chunk_loss(chunks, rows, inputs[rows], objective, gradients) for rows in chunks])
        gradients.finish()
        ctx.head, ctx.gradients = head, gradients
        reported = results.logprobs, results.entropies, results.log_ratio, results.clipped, results.clamped
        ctx.mark_non_differentiable(*reported)
        ctx.set_materialize_grads(False)
        return results.loss.sum(), *reported

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a fused loss hands its gradients out once: it has no second backward pass")
        gradients, ctx.gradients = ctx.gradients, None
        given = (None, None) if upstream is None else gradients.hand_out(ctx.head, upstream)
        return *given, None, None, None, None, None


class _Logprobs(torch.autograd.Function):
    """Saves its inputs and the four numbers of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: OutputHead, targets: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        chunks = Chunks(hidden, weight, head, chunk_rows)
        partials = _all_statistics(chunks, targets)
        ctx.save_for_backward(hidden, weight, targets, partials)
        ctx.head, ctx.chunk_rows = head, chunk_rows
        return chunks.logprob_entropy(partials)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, partials = ctx.saved_tensors
        chunks = Chunks(hidden, weight, ctx.head, ctx.chunk_rows)
        gradients = Gradients(chunks, hidden=ctx.needs_input_grad[0], weight=ctx.needs_input_grad[1])
        for rows in chunks:
            logits = chunks.logits(rows)
            chunks.write_gradient(logits, partials[:, rows], targets[rows], grad_logprobs[rows], grad_entropies[rows])
            gradients.add(rows, logits)
        gradients.finish()
        return *gradients.hand_out(ctx.head, partials.new_ones(())), None, None, None


def _chunk_loss(
    chunks: Chunks, rows: slice, inputs: LossInputs, objective: Objective, gradients: Gradients
) -> TokenLoss:
    logits = chunks.logits(rows)
    partials = statistics.gather(chunks.statistics(logits, inputs.targets), chunks.head.group)
    results = chunks.loss(logits, partials, inputs, objective, write_gradient=bool(gradients))
    if gradients:
        gradients.add(rows, logits)
    return results


def _all_statistics(chunks: Chunks, targets: Tensor) -> Tensor:
    """Of all tokens and ranks, [ranks, tokens, 4]."""
    partials = [chunks.statistics(chunks.logits(rows), targets[rows]) for rows in chunks]
    return statistics.gather(torch.cat(partials), chunks.head.group)
