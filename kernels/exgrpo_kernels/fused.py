"""From hidden states to log-probs, entropies and the loss, through the output layer: the one way in for a trainer.

Every form computes the same numbers, those of `reference`:

- `reference`: the logits of all tokens at once, autograd of the plain definition. For comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from exgrpo_kernels.reference import Objective, logprob_entropy, token_terms

Form = Literal["auto", "reference", "logits", "linear"]


@dataclass(frozen=True)
class OutputHead:
    """The output layer on this rank, and how the ranks' columns make one vocabulary."""

    weight: Float[Tensor, "columns hidden"]
    valid_vocab: int
    """Vocabulary of all ranks together, without padding: columns from here on take no probability."""
    vocab_start: int = 0
    """Number of this rank's first column."""
    group: dist.ProcessGroup | None = None
    """Ranks that share the columns; None: all are here."""
    reduce_hidden_grad: bool = False
    """Sum the gradient of the hidden states over `group`; False where the caller's own gather does (sequence
    parallel)."""
    temperature: float = 1.0
    main_grad: Float[Tensor, "columns hidden"] | None = None
    """Where the backward pass adds the gradient of `weight`, in this tensor's dtype; autograd then sees a gradient of
    zero, so that hooks of the weight run. None: autograd gets the gradient."""


@dataclass(frozen=True)
class LossInputs:
    """Constants of the loss, for each response token."""

    targets: Int[Tensor, " tokens"]
    old_logprobs: Float[Tensor, " tokens"]
    """The ratio's denominators, see `reference.token_terms`."""
    advantages: Float[Tensor, " tokens"]
    replayed: Bool[Tensor, " tokens"]
    policy_weights: Float[Tensor, " tokens"]
    """Factor of the policy term in the loss: already divided by the global count."""
    entropy_weights: Float[Tensor, " tokens"] | None
    """Factor of the entropy, which the loss subtracts; None where all are 0."""


@dataclass(frozen=True)
class FusedLoss:
    """The loss of some tokens and what is reported of each; only `loss` has gradients."""

    loss: Float[Tensor, ""]
    """Sum over tokens of `policy_weight * policy_loss - entropy_weight * entropy`."""
    logprobs: Float[Tensor, " tokens"]
    entropies: Float[Tensor, " tokens"]
    log_ratio: Float[Tensor, " tokens"]
    clipped: Bool[Tensor, " tokens"]
    clamped: Bool[Tensor, " tokens"]


def score(
    hidden: Float[Tensor, "tokens hidden"], head: OutputHead, targets: Int[Tensor, " tokens"], *, form: Form = "auto"
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each target and entropy (nats) under softmax(logits / temperature), without gradients."""
    del form
    with torch.no_grad():
        return _logprob_entropy(hidden, head, targets)


def token_loss(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    inputs: LossInputs,
    objective: Objective,
    *,
    form: Form = "auto",
) -> FusedLoss:
    """The loss of the tokens, with exact gradients of `hidden` and `head.weight`."""
    del form
    logprobs, entropies = _logprob_entropy(hidden, head, inputs.targets)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    loss = (inputs.policy_weights * terms.policy_loss).sum()
    if inputs.entropy_weights is not None:
        loss = loss - (inputs.entropy_weights * entropies).sum()
    return FusedLoss(loss, logprobs.detach(), entropies.detach(), terms.log_ratio, terms.clipped, terms.clamped)


def _logprob_entropy(hidden: Tensor, head: OutputHead, targets: Tensor) -> tuple[Tensor, Tensor]:
    if head.reduce_hidden_grad:
        hidden = _SumGradient.apply(hidden, head.group)
    return logprob_entropy(
        hidden @ head.weight.t(),
        targets,
        temperature=head.temperature,
        valid_vocab=head.valid_vocab,
        group=head.group,
        vocab_start=head.vocab_start,
    )


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
