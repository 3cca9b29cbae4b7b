"""Tokens in chunks through the output layer, and the gradients summed up chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo_kernels.dispatch import row_kernels
from exgrpo_kernels.products import (
    add_weight_gradient,
    conversion_buffer,
    for_products,
    write_hidden_gradient,
    write_logits,
)
from exgrpo_kernels.reference import Objective
from exgrpo_kernels.torch_kernels import statistics_dtype
from exgrpo_kernels.types import LossInputs, OutputHead, TokenLoss


class Chunks:
    """The logits of one chunk of tokens at a time, all in the same scratch tensor.

    Padded columns are left out: `weight` and the logits have the columns here that are in the vocabulary.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, head: OutputHead, rows: int) -> None:
        self._layout = head.columns.layout(len(weight))
        self.valid = self._layout["valid"]
        self.num_columns = len(weight)
        self.hidden, self.weight, self.head = hidden.detach(), weight.detach()[: self.valid], head
        self._rows = rows
        # Rows keep the whole width: products on GPUs want them to begin at multiples of 16 bytes.
        shape = min(rows, len(hidden)), len(weight)
        self._scratch = torch.empty(shape, dtype=statistics_dtype(hidden.dtype), device=hidden.device)
        self.buffer = conversion_buffer(self.weight, self._scratch.dtype)
        self._kernels = row_kernels(self._scratch)

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits, their statistics and the weight's gradient."""
        return self._scratch.dtype

    def __iter__(self) -> Iterator[slice]:
        # No tokens are one chunk of none, so that every caller has results to join.
        return (slice(start, start + self._rows) for start in range(0, max(1, len(self.hidden)), self._rows))

    def logits(self, rows: slice) -> Tensor:
        """Overwritten by the next call."""
        hidden = self.hidden[rows]
        logits = self._scratch[: len(hidden), : self.valid]
        write_logits(logits, hidden, self.weight, self.buffer)
        return logits

    def statistics(self, logits: Tensor, targets: Tensor) -> Tensor:
        """[rows, 4], of the columns here."""
        return self._kernels.row_statistics(logits, targets, **self._layout)

    def logprob_entropy(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """From the statistics of all ranks [ranks, rows, 4]."""
        return self._kernels.logprob_entropy(statistics, temperature=self.head.temperature)

    def loss(
        self, logits: Tensor, statistics: Tensor, inputs: LossInputs, objective: Objective, *, write_gradient: bool
    ) -> TokenLoss:
        """From the statistics of all ranks; with `write_gradient`, it takes the place of the logits."""
        return self._kernels.loss_and_gradient(
            logits, statistics, inputs.targets, inputs, objective, **self._layout, write_gradient=write_gradient
        )

    def write_gradient(
        self, logits: Tensor, statistics: Tensor, targets: Tensor, logprobs: Tensor, entropies: Tensor
    ) -> None:
        """The logits' gradient in their place, given that of log-probs and entropies."""
        self._kernels.write_gradient(logits, statistics, targets, logprobs, entropies, **self._layout)


class Gradients:
    """Gradients of hidden states and weight; None where not wanted. The weight's is float32 for 16-bit weights."""

    def __init__(self, chunks: Chunks, *, hidden: bool, weight: bool) -> None:
        like, width = chunks.hidden, chunks.hidden.shape[1]
        self._chunks = chunks
        self._hidden = torch.empty(like.shape, dtype=like.dtype, device=like.device) if hidden else None
        self._weight = None
        if weight:
            self._weight = torch.empty(chunks.num_columns, width, dtype=chunks.dtype, device=like.device)
            if chunks.valid < chunks.num_columns:
                self._weight[chunks.valid :] = 0

    def __bool__(self) -> bool:
        return self._hidden is not None or self._weight is not None

    def add(self, rows: slice, gradient: Tensor) -> None:
        """Those of the tokens `rows`, from the gradient of their logits; chunks must come in order."""
        chunks = self._chunks
        gradient = for_products(gradient, chunks.weight)
        if self._hidden is not None:
            write_hidden_gradient(self._hidden[rows], gradient, chunks.weight, chunks.buffer)
        if self._weight is not None:
            total = self._weight[: chunks.valid]
            add_weight_gradient(total, gradient, chunks.hidden[rows], first=rows.start == 0)

    def finish(self) -> None:
        """Let go of the scratch, and sum the hidden states' over the ranks where asked to; collective."""
        head = self._chunks.head
        del self._chunks
        if self._hidden is not None and head.reduce_hidden_grad and head.group is not None:
            dist.all_reduce(self._hidden, group=head.group)

    def hand_out(self, head: OutputHead, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Both times the gradient from above; no longer kept here. The weight's goes to `main_grad` if there is one."""
        hidden, weight = self._hidden, self._weight
        self._hidden = self._weight = None
        # On a GPU, to look at the factor would be to wait for it.
        factor = None if not upstream.is_cuda and upstream == 1 else upstream
        if hidden is not None and factor is not None:
            hidden.mul_(factor)
        if weight is None:
            return hidden, None
        if factor is not None:
            weight.mul_(factor)
        if head.main_grad is None:
            return hidden, weight.to(head.weight.dtype)
        head.main_grad.add_(weight)
        del weight
        return hidden, torch.zeros_like(head.weight)
