"""From hidden states to log-probs, entropies and the loss, through the output layer: the one way in for a trainer.

Every form computes the same numbers, those of `reference`:

- `linear`: some tokens at a time, gradients made in the forward pass; no logits but those of one chunk are ever kept.
- `logits`: all tokens in one chunk, so the logits once, and the gradient in their place.
- `reference`: the logits of all tokens, autograd of the plain definition. For comparison.
- `auto`: `linear`.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_kernels.chunk_size import default_chunk_rows
from exgrpo_kernels.linear import linear_logprobs, linear_loss, linear_score
from exgrpo_kernels.logits import logits_loss
from exgrpo_kernels.plain import plain_logprobs, plain_loss
from exgrpo_kernels.reference import Objective
from exgrpo_kernels.types import Columns, FusedLoss, LossInputs, OutputHead

__all__ = [
    "Columns", "Form", "FusedLoss", "LossInputs", "Objective", "OutputHead", "logits_loss", "logprobs", "score",
    "token_loss",
]  # fmt: skip

Form = Literal["auto", "reference", "logits", "linear"]


def score(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    targets: Int[Tensor, " tokens"],
    *,
    form: Form = "auto",
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each target and entropy (nats) under softmax(logits / temperature), without gradients.

    `chunk_size`: tokens of a chunk of the linear form; None: `default_chunk_rows`.

    Raises:
        RuntimeError: a target is not below `head.valid_vocab`.
        ValueError: the temperature or the vocabulary is out of range.
    """
    with torch.no_grad():
        if form == "reference":
            return plain_logprobs(hidden, head, targets)
        return linear_score(hidden, head, targets, chunk_rows=_chunk_rows(hidden, head, form, chunk_size))


def token_loss(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    inputs: LossInputs,
    objective: Objective,
    *,
    form: Form = "auto",
    chunk_size: int | None = None,
) -> FusedLoss:
    """The loss of the tokens, with exact gradients of `hidden` and `head.weight`, which can be asked for once.

    Collective over `head.group`, whose ranks must all call with the same tokens. `chunk_size` and what is raised:
    as in `score`.
    """
    if form == "reference":
        return plain_loss(hidden, head, inputs, objective)
    rows = _chunk_rows(hidden, head, form, chunk_size)
    return linear_loss(hidden, head, inputs, objective, chunk_rows=rows)


def logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    head: OutputHead,
    targets: Int[Tensor, " tokens"],
    *,
    form: Form = "auto",
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each target and entropy, with exact gradients, for losses that `token_loss` does not have.

    The backward pass computes the logits again: a quarter more work than `token_loss`. Collective, and raises, as it.
    """
    if form == "reference":
        return plain_logprobs(hidden, head, targets)
    return linear_logprobs(hidden, head, targets, chunk_rows=_chunk_rows(hidden, head, form, chunk_size))


def _chunk_rows(hidden: Tensor, head: OutputHead, form: Form, chunk_size: int | None) -> int:
    if form == "logits":
        return max(1, len(hidden))
    return default_chunk_rows(hidden.shape[1], len(head.weight)) if chunk_size is None else chunk_size
