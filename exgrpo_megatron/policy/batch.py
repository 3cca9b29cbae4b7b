"""Sequences to padded micro-batches and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from exgrpo_megatron.types import TokenIds, TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass, padded on the right. Per-token tensors run over response tokens, row by row."""

    members: tuple[int, ...]
    """Index of each row's sequence in the list the batch was made from."""
    response_lengths: tuple[int, ...]
    tokens: Int[Tensor, "rows positions"]
    """Inputs: each sequence without its last token."""
    predicts_response: Bool[Tensor, "rows positions"]
    """True where the next token is a response token."""
    targets: Int[Tensor, " tokens"]
    """The response tokens."""


@dataclass(frozen=True)
class TokenConstants:
    """What the objective needs beside the model's log-probs, for each response token of a micro-batch."""

    old_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    replayed: Bool[Tensor, " tokens"]
    policy_weights: Float[Tensor, " tokens"]
    entropy_weights: Float[Tensor, " tokens"]


def micro_batches(
    sequences: Sequence[tuple[TokenIds, TokenIds]], size: int, device: torch.device, multiple: int = 1
) -> list[MicroBatch]:
    """(prompt, response) pairs in micro-batches of `size`, longest first so that neighbours have like lengths.

    The number of positions of each is padded to a multiple of `multiple`.

    Raises:
        ValueError: a prompt is empty, so that its response's first token has nothing to be predicted from.
    """
    for index, (prompt, _) in enumerate(sequences):
        if len(prompt) == 0:
            raise ValueError(f"sequence {index} has an empty prompt")
    order = sorted(range(len(sequences)), key=lambda index: -sum(map(len, sequences[index])))
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return [_pad([sequences[index] for index in group], tuple(group), device, multiple) for group in groups]


def token_constants(batch: MicroBatch, sequences: Sequence[TrainSequence]) -> TokenConstants:
    """The constants of `batch`, which was made from `sequences`."""
    rows = [sequences[index] for index in batch.members]
    device = batch.tokens.device

    def per_token(value: Callable[[TrainSequence], float]) -> Tensor:
        repeated = np.repeat(np.array([value(row) for row in rows], np.float32), batch.response_lengths)
        return torch.from_numpy(repeated).to(device)

    old = np.concatenate([np.asarray(row.old_logprobs, np.float32) for row in rows])
    return TokenConstants(
        old_logprobs=torch.from_numpy(old).to(device),
        advantages=per_token(lambda row: row.advantage),
        replayed=per_token(lambda row: float(row.replayed)).bool(),
        policy_weights=per_token(lambda row: row.policy_weight),
        entropy_weights=per_token(lambda row: row.entropy_weight),
    )


def in_input_order(batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[NDArray]:
    """Per-token values of every micro-batch, as one array a sequence, in the order the sequences were given in."""
    pieces: dict[int, NDArray] = {}
    for batch, tensor in zip(batches, values, strict=True):
        rows = np.split(tensor.detach().cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])
        pieces.update(zip(batch.members, rows, strict=True))
    return [pieces[index] for index in range(len(pieces))]


def _pad(
    rows: list[tuple[TokenIds, TokenIds]], members: tuple[int, ...], device: torch.device, multiple: int
) -> MicroBatch:
    longest = max(len(prompt) + len(response) - 1 for prompt, response in rows)
    positions = -(-longest // multiple) * multiple
    tokens = np.zeros((len(rows), positions), np.int64)
    predicts = np.zeros((len(rows), positions), np.bool_)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response) - 1
        tokens[row, :end] = np.concatenate([prompt, response])[:end]
        predicts[row, len(prompt) - 1 : end] = True
    targets = np.concatenate([response for _, response in rows]).astype(np.int64)
    return MicroBatch(
        members=members,
        response_lengths=tuple(len(response) for _, response in rows),
        tokens=torch.from_numpy(tokens).to(device),
        predicts_response=torch.from_numpy(predicts).to(device),
        targets=torch.from_numpy(targets).to(device),
    )


def pairs(sequences: Sequence[TrainSequence]) -> Iterator[tuple[TokenIds, TokenIds]]:
    """The (prompt, response) of each sequence.

    Raises:
        ValueError: a sequence does not have one old log-prob a response token.
    """
    for index, sequence in enumerate(sequences):
        if len(sequence.old_logprobs) != len(sequence.response_ids):
            raise ValueError(
                f"sequence {index} has {len(sequence.old_logprobs)} old log-probs for "
                f"{len(sequence.response_ids)} response tokens"
            )
        yield sequence.prompt_ids, sequence.response_ids
