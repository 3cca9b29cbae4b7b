"""Where these tests can run, the columns of a rank, and the exact numbers in float64."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from exgrpo_kernels.fused import LossInputs
from exgrpo_kernels.reference import Objective, token_terms

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_triton = [pytest.mark.triton, pytest.mark.skipif(not HAS_TRITON, reason="needs triton: make setup-triton")]
needs_interpreter = [
    *needs_triton,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, for all of the process: make test-kernels"),
]


@dataclass(frozen=True)
class Exact:
    """What float64 says of each token, and the gradient of the summed loss."""

    logprobs: Tensor
    entropies: Tensor
    loss: Tensor
    gradient: Tensor
    log_ratio: Tensor
    clipped: Tensor
    clamped: Tensor


def exact(logits: Tensor, inputs: LossInputs, objective: Objective, *, temperature: float, valid: int) -> Exact:
    """By torch's own log_softmax in float64, the objective's definition, and autograd through both."""
    whole = logits.detach().double().requires_grad_()
    log_probs = (whole[:, :valid] / temperature).log_softmax(dim=1)
    logprobs = log_probs.gather(1, inputs.targets[:, None].long()).squeeze(1)
    # A probability of 0 has no share in the entropy; where() keeps its gradient from being 0 * inf.
    certain = log_probs.where(log_probs > -torch.inf, 0.0)
    entropies = -(log_probs.exp() * certain).sum(dim=1)
    terms = token_terms(logprobs, inputs.old_logprobs.double(), inputs.advantages.double(), inputs.replayed, objective)
    loss = inputs.policy_weights.double() * terms.policy_loss
    if inputs.entropy_weights is not None:
        loss = loss - inputs.entropy_weights.double() * entropies
    loss.sum().backward()
    assert whole.grad is not None
    return Exact(
        logprobs.detach(), entropies.detach(), loss.detach(), whole.grad, terms.log_ratio, terms.clipped, terms.clamped
    )


def random_inputs(logits: Tensor, *, valid: int, temperature: float = 1.0, seed: int = 1) -> LossInputs:
    """Fresh and replayed tokens in turn, ratios around 1, targets drawn from what the logits allow."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(logits)
    log_probs = (logits[:, :valid].double() / temperature).log_softmax(dim=1)
    targets = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    drift = 0.4 * torch.randn(rows, generator=generator)
    return LossInputs(
        targets=targets,
        old_logprobs=log_probs.gather(1, targets[:, None]).squeeze(1).float() + drift,
        advantages=torch.randn(rows, generator=generator),
        replayed=torch.arange(rows) % 2 == 1,
        policy_weights=torch.rand(rows, generator=generator) + 0.1,
        entropy_weights=0.2 * torch.rand(rows, generator=generator) + 0.01,
    )


def with_target(inputs: LossInputs, column: int) -> LossInputs:
    """The same constants with every target in one column."""
    return replace(inputs, targets=torch.full_like(inputs.targets, column))


@dataclass(frozen=True)
class Shard:
    """One rank's columns, copied, and what the kernels are told of them."""

    logits: Tensor
    vocab_start: int
    valid: int


def shards(logits: Tensor, ranks: int, valid: int) -> list[Shard]:
    """The columns shared out evenly, as tensor parallelism does."""
    width = logits.shape[1] // ranks
    assert width * ranks == logits.shape[1]
    return [
        Shard(logits[:, start : start + width].clone(), start, min(max(valid - start, 0), width))
        for start in range(0, logits.shape[1], width)
    ]


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, over the expected value where that is above 1."""
    return ((found.double() - expected).abs() / expected.abs().clamp(min=1)).max().item()


def gradient_error(found: Tensor, expected: Tensor, inputs: LossInputs, temperature: float = 1.0) -> float:
    """Largest difference in a row over the row's largest gradient, or over the part of its weights float32 can see.

    Where p is within 1e-7 of 1, float32 has no digits of 1 - p: there the error is measured by the factors before it.
    """
    weights = inputs.policy_weights * inputs.advantages.abs()
    if inputs.entropy_weights is not None:
        weights = weights + inputs.entropy_weights
    scale = expected.abs().amax(dim=1).maximum(0.1 * weights.double() / temperature).clamp(min=1e-30)
    return ((found.double() - expected).abs().amax(dim=1) / scale).max().item()
