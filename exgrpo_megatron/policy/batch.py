"""Sequences to micro-batches and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from exgrpo_kernels.fused import LossInputs
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.policy.grouping import PackingAlgorithm, by_number, by_padded_size, packed, zigzag
from exgrpo_megatron.types import Logprobs, TokenIds, TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass: rows padded on the right, or one row in which they follow one another.

    Tensors hold the part of the positions that is this context-parallel rank's, and of the response tokens those that
    are predicted at these positions, sequence by sequence.
    """

    members: tuple[int, ...]
    """Index of each sequence in the list the batch was made from."""
    response_lengths: tuple[int, ...]
    packed_lengths: tuple[int, ...] | None
    """Positions of each sequence in a packed row, all ranks' together and with the padding behind it; None: padded."""
    tokens: Int[Tensor, "rows positions"]
    """Inputs: each sequence without its last token."""
    predicts_response: Bool[Tensor, "rows positions"]
    """True where the next token is a response token."""
    targets: Int[Tensor, " tokens"]
    """The response tokens."""
    own: Int[Tensor, " tokens"] | None
    """Which of the micro-batch's response tokens those here are; None: all."""
    num_positions: int
    """Positions of all ranks, padding included."""
    num_padding: int

    @property
    def num_tokens(self) -> int:
        """Response tokens of all ranks."""
        return sum(self.response_lengths)


@dataclass(frozen=True)
class BatchRule:
    """How sequences become micro-batches."""

    kind: Literal["number", "padded_size", "packed"]
    limit: int
    """Sequences of a micro-batch by number, else positions."""
    algorithm: PackingAlgorithm = "first_fit_decreasing"
    sequence_multiple: int = 1
    """Positions of each sequence of a pack are padded to a multiple of this."""
    row_multiple: int = 1
    """Positions of a row are padded to a multiple of this, itself one of `sequence_multiple`."""
    context_ranks: int = 1
    context_rank: int = 0

    @classmethod
    def of(cls, policy: PolicyConfig, *, train: bool, context_rank: int) -> BatchRule:
        """The rule of a recipe for one context-parallel rank, in training or in forward-only passes."""
        layout = policy.megatron_cfg
        by_tokens = policy.token_budget is not None
        packing = policy.sequence_packing
        return cls(
            kind="packed" if packing.enabled else "padded_size" if by_tokens else "number",
            limit=policy.mb_tokens(train=train) if by_tokens else policy.mb_sequences(train=train),
            algorithm=packing.algorithm,
            sequence_multiple=layout.sequence_multiple,
            row_multiple=policy.padded_to,
            context_ranks=layout.context_parallel_size,
            context_rank=context_rank,
        )

    def groups(self, positions: Sequence[int]) -> list[list[int]]:
        """Indices of the sequences of each micro-batch. `positions`: of each sequence, without padding."""
        if self.kind == "number":
            return by_number(positions, self.limit)
        capacity = self.limit - self.limit % self.row_multiple
        if self.kind == "padded_size":
            return by_padded_size([_up(length, self.row_multiple) for length in positions], capacity)
        return packed([_up(length, self.sequence_multiple) for length in positions], capacity, self.algorithm)


def micro_batches(
    sequences: Sequence[tuple[TokenIds, TokenIds]], rule: BatchRule, device: torch.device
) -> list[MicroBatch]:
    """(prompt, response) pairs in micro-batches.

    Raises:
        ValueError: a prompt is empty, so that its response's first token has nothing to be predicted from.
    """
    for index, (prompt, _) in enumerate(sequences):
        if len(prompt) == 0:
            raise ValueError(f"sequence {index} has an empty prompt")
    groups = rule.groups([_num_inputs(pair) for pair in sequences])
    lay_out = _packed_row if rule.kind == "packed" else _padded_rows
    return [lay_out([sequences[index] for index in group], rule).to_batch(group, rule, device) for group in groups]


def loss_inputs(
    batch: MicroBatch, sequences: Sequence[TrainSequence], *, mean_entropy_coeff: float = 0.0
) -> LossInputs:
    """The constants of the loss for the response tokens of `batch` that are here; it was made from `sequences`.

    `mean_entropy_coeff` is the coefficient of the micro-batch's mean entropy, beside the sequences' own weights.
    """
    rows = [sequences[index] for index in batch.members]
    device = batch.tokens.device

    def here(values: NDArray) -> Tensor:
        tensor = torch.from_numpy(values).to(device)
        return tensor if batch.own is None else tensor[batch.own]

    def per_token(value: Callable[[TrainSequence], float]) -> Tensor:
        return here(np.repeat(np.array([value(row) for row in rows], np.float32), batch.response_lengths))

    def joined(values: Callable[[TrainSequence], NDArray]) -> Tensor:
        return here(np.concatenate([np.zeros(0, np.float32), *(values(row) for row in rows)], dtype=np.float32))

    policy_weights = per_token(lambda row: row.policy_weight)
    if any(row.token_weights is not None for row in rows):
        policy_weights = policy_weights * joined(_token_weights)
    each = mean_entropy_coeff / max(1, batch.num_tokens)
    weighted = mean_entropy_coeff != 0 or any(row.entropy_weight for row in rows)
    return LossInputs(
        targets=batch.targets,
        old_logprobs=joined(lambda row: row.old_logprobs),
        advantages=per_token(lambda row: row.advantage),
        replayed=per_token(lambda row: float(row.replayed)).bool(),
        policy_weights=policy_weights,
        entropy_weights=per_token(lambda row: row.entropy_weight + each) if weighted else None,
    )


def _token_weights(row: TrainSequence) -> Logprobs:
    given = row.token_weights
    return np.ones(len(row.response_ids), np.float32) if given is None else given


def in_input_order(batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[NDArray]:
    """Values of all response tokens of every micro-batch, as one array a sequence, in the order of the sequences."""
    pieces: dict[int, NDArray] = {}
    for batch, tensor in zip(batches, values, strict=True):
        rows = np.split(tensor.detach().cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])
        pieces.update(zip(batch.members, rows, strict=True))
    return [pieces[index] for index in range(len(pieces))]


@dataclass(frozen=True)
class _Rows:
    """Whole rows, before context-parallel ranks share them."""

    tokens: Int[np.ndarray, "rows positions"]
    predicts: Bool[np.ndarray, "rows positions"]
    targets: Int[np.ndarray, " tokens"]
    response_lengths: tuple[int, ...]
    packed_lengths: tuple[int, ...] | None
    num_inputs: int

    def to_batch(self, members: list[int], rule: BatchRule, device: torch.device) -> MicroBatch:
        """The part of one context-parallel rank."""
        tokens, predicts, targets, own = self.tokens, self.predicts, self.targets, None
        if rule.context_ranks > 1:
            lengths = self.packed_lengths or (tokens.shape[1],)
            positions = zigzag(lengths, rule.context_ranks, rule.context_rank)
            numbers = (predicts.ravel().cumsum() - 1).reshape(predicts.shape)  # of the token predicted there
            tokens, predicts = tokens[:, positions], predicts[:, positions]
            own = numbers[:, positions][predicts]
            targets = targets[own]
        return MicroBatch(
            members=tuple(members),
            response_lengths=self.response_lengths,
            packed_lengths=self.packed_lengths,
            tokens=torch.from_numpy(tokens).to(device),
            predicts_response=torch.from_numpy(predicts).to(device),
            targets=torch.from_numpy(targets).to(device),
            own=None if own is None else torch.from_numpy(own).to(device),
            num_positions=self.tokens.size,
            num_padding=self.tokens.size - self.num_inputs,
        )


def _padded_rows(sequences: list[tuple[TokenIds, TokenIds]], rule: BatchRule) -> _Rows:
    positions = _up(max(map(_num_inputs, sequences)), rule.row_multiple)
    starts = [row * positions for row in range(len(sequences))]
    return _filled(sequences, starts, (len(sequences), positions), None)


def _packed_row(sequences: list[tuple[TokenIds, TokenIds]], rule: BatchRule) -> _Rows:
    lengths = [_up(_num_inputs(pair), rule.sequence_multiple) for pair in sequences]
    # Padding that the whole row needs goes behind the last sequence, as a part of it: nothing sees it.
    lengths[-1] += -sum(lengths) % rule.row_multiple
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return _filled(sequences, starts, (1, sum(lengths)), tuple(lengths))


def _filled(
    sequences: list[tuple[TokenIds, TokenIds]],
    starts: list[int],
    shape: tuple[int, int],
    packed_lengths: tuple[int, ...] | None,
) -> _Rows:
    """The sequences at these places of the flattened rows; token 0 elsewhere."""
    tokens = np.zeros(shape[0] * shape[1], np.int64)
    predicts = np.zeros(len(tokens), np.bool_)
    for start, (prompt, response) in zip(starts, sequences, strict=True):
        end = start + len(prompt) + len(response) - 1
        tokens[start:end] = np.concatenate([prompt, response])[:-1]
        predicts[start + len(prompt) - 1 : end] = True
    return _Rows(
        tokens=tokens.reshape(shape),
        predicts=predicts.reshape(shape),
        targets=np.concatenate([response for _, response in sequences]).astype(np.int64),
        response_lengths=tuple(len(response) for _, response in sequences),
        packed_lengths=packed_lengths,
        num_inputs=sum(map(_num_inputs, sequences)),
    )


def _num_inputs(pair: tuple[TokenIds, TokenIds]) -> int:
    """Positions of a sequence: it goes in without its last token (a lone token without a response stays)."""
    return max(1, len(pair[0]) + len(pair[1]) - 1)


def _up(length: int, multiple: int) -> int:
    """The next multiple."""
    return -(-length // multiple) * multiple


def pairs(sequences: Sequence[TrainSequence]) -> Iterator[tuple[TokenIds, TokenIds]]:
    """The (prompt, response) of each sequence.

    Raises:
        ValueError: a sequence does not have one old log-prob, or one weight, a response token.
    """
    for index, sequence in enumerate(sequences):
        for what, values in (("old log-probs", sequence.old_logprobs), ("weights", sequence.token_weights)):
            if values is not None and len(values) != len(sequence.response_ids):
                raise ValueError(
                    f"sequence {index} has {len(values)} {what} for {len(sequence.response_ids)} response tokens"
                )
        yield sequence.prompt_ids, sequence.response_ids
