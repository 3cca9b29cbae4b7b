"""What goes into the fused loss and comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypedDict

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Layout(TypedDict):
    """What the kernels are told of the columns here."""

    temperature: float
    valid: int
    """Columns here that are no padding: the first ones."""
    vocab_start: int


@dataclass(frozen=True)
class Columns:
    """Which columns of the vocabulary the logits of this rank are, and how they become probabilities."""

    valid_vocab: int
    """Vocabulary of all ranks together, without padding: columns from here on take no probability."""
    vocab_start: int = 0
    """Number of this rank's first column."""
    group: dist.ProcessGroup | None = None
    """Ranks that share the columns; None: all are here."""
    temperature: float = 1.0

    def layout(self, columns: int) -> Layout:
        """For the `columns` of this rank.

        Raises:
            ValueError: the temperature or the vocabulary is out of range.
        """
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, found {self.temperature}")
        if self.valid_vocab < 1 or (self.group is None and self.valid_vocab > self.vocab_start + columns):
            raise ValueError(
                f"valid_vocab must be in 1..{self.vocab_start + columns} (the columns of the logits), "
                f"found {self.valid_vocab}"
            )
        valid = min(max(self.valid_vocab - self.vocab_start, 0), columns)
        return Layout(temperature=self.temperature, valid=valid, vocab_start=self.vocab_start)


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

    @property
    def columns(self) -> Columns:
        """The same without the weight, as `logits_loss` takes it."""
        return Columns(self.valid_vocab, self.vocab_start, self.group, self.temperature)


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

    def __getitem__(self, rows: slice) -> LossInputs:
        """These tokens alone."""
        if rows.start == 0 and rows.stop >= len(self.targets):
            return self
        return replace(
            self,
            targets=self.targets[rows],
            old_logprobs=self.old_logprobs[rows],
            advantages=self.advantages[rows],
            replayed=self.replayed[rows],
            policy_weights=self.policy_weights[rows],
            entropy_weights=None if self.entropy_weights is None else self.entropy_weights[rows],
        )


@dataclass(frozen=True)
class TokenLoss:
    """What is known of each token, without gradients."""

    logprobs: Float[Tensor, " tokens"]
    entropies: Float[Tensor, " tokens"]
    log_ratio: Float[Tensor, " tokens"]
    loss: Float[Tensor, " tokens"]
    """`policy_weight * policy_loss - entropy_weight * entropy`."""
    clipped: Bool[Tensor, " tokens"]
    clamped: Bool[Tensor, " tokens"]

    @staticmethod
    def joined(parts: list[TokenLoss]) -> TokenLoss:
        """Of all tokens, from those of one chunk after another."""
        if len(parts) == 1:
            return parts[0]
        names = (field.name for field in fields(TokenLoss))
        return TokenLoss(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


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
