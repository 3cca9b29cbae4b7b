"""Which sequences share a micro-batch, and what stands where in it; expectations are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.policy.batch import BatchRule, MicroBatch, micro_batches
from exgrpo_megatron.policy.grouping import by_number, by_padded_size, packed, zigzag

CPU = torch.device("cpu")


def lengths_of(groups: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [[lengths[index] for index in group] for group in groups]


def sequence(prompt: int, response: int) -> tuple[np.ndarray, np.ndarray]:
    """Token 1, 2, 3, ... through prompt and response."""
    tokens = np.arange(1, prompt + response + 1, dtype=np.int32)
    return tokens[:prompt], tokens[prompt:]


def test_groups_by_number_have_neighbours_in_length() -> None:
    assert by_number([3, 9, 5, 7, 1], 2) == [[1, 3], [2, 0], [4]]


def test_rows_times_the_longest_stay_within_the_budget() -> None:
    """From the longest: 9 + 9 (2 x 9 = 18 <= 20, 3 x 9 = 27 not); 6, 5, 4 (18 <= 20; a fourth makes 24); 3, 1."""
    lengths = [4, 9, 1, 6, 9, 3, 5]
    assert lengths_of(by_padded_size(lengths, 20), lengths) == [[9, 9], [6, 5, 4], [3, 1]]


def test_first_fit_takes_the_first_pack_with_room() -> None:
    """Capacity 10. 6; 5; 5 joins the second (10); 3 joins the first (9); 3 opens a third; 1 joins the first (10)."""
    lengths = [3, 6, 5, 1, 5, 3]
    assert lengths_of(packed(lengths, 10, "first_fit_decreasing"), lengths) == [[6, 3, 1], [5, 5], [3]]


def test_best_fit_takes_the_pack_with_the_least_room() -> None:
    """Capacity 10. 7; 5; 4 joins the second (9); then 1: first fit puts it to the 7, best fit where the room is 1."""
    lengths = [7, 5, 4, 1]
    assert lengths_of(packed(lengths, 10, "first_fit_decreasing"), lengths) == [[7, 1], [5, 4]]
    assert lengths_of(packed(lengths, 10, "best_fit_decreasing"), lengths) == [[7], [5, 4, 1]]


@pytest.mark.parametrize("algorithm", ["first_fit_decreasing", "best_fit_decreasing"])
def test_packs_hold_every_sequence_once_within_the_budget(algorithm: str) -> None:
    """And are at most 11/9 of what the sum of lengths needs, and one (the bound for both algorithms)."""
    lengths = np.random.default_rng(0).integers(1, 400, 500).tolist()
    groups = packed(lengths, 1000, algorithm)
    assert sorted(index for group in groups for index in group) == list(range(500))
    assert max(sum(lengths[index] for index in group) for group in groups) <= 1000
    assert len(groups) <= 11 / 9 * -(-sum(lengths) // 1000) + 1


def test_a_sequence_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert packed([3, 12, 4], 10, "first_fit_decreasing") == [[1], [2, 0]]
    assert by_padded_size([3, 12, 4], 10) == [[1], [2, 0]]


def test_nothing_makes_no_group() -> None:
    assert packed([], 10, "first_fit_decreasing") == by_padded_size([], 10) == by_number([], 10) == []


def test_zigzag_pairs_early_parts_with_late_ones() -> None:
    """Two sequences of 8 and 4 positions on two ranks, in four parts each: rank 0 has the first and the last."""
    assert zigzag((8, 4), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag((8, 4), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def only(batches: list[MicroBatch]) -> MicroBatch:
    (batch,) = batches
    return batch


def test_a_packed_row_has_sequences_behind_one_another() -> None:
    """Lengths 2 + 3 and 1 + 2: inputs leave out the last token, so 4 and 2 positions; the row is padded to 8."""
    rule = BatchRule("packed", limit=16, row_multiple=8)
    batch = only(micro_batches([sequence(1, 2), sequence(2, 3)], rule, CPU))
    assert batch.members == (1, 0)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 1, 2, 0, 0]]
    assert batch.predicts_response.int().tolist() == [[0, 1, 1, 1, 1, 1, 0, 0]]
    assert batch.targets.tolist() == [3, 4, 5, 2, 3]
    assert batch.packed_lengths == (4, 4)
    assert (batch.num_positions, batch.num_padding, batch.own) == (8, 2, None)


def test_context_parallel_ranks_share_a_packed_row() -> None:
    """Sequences of 4 and 2 inputs are padded to multiples of 4. Rank 0 has positions 0, 3 of each, rank 1 has 1, 2."""
    pairs = [sequence(2, 3), sequence(1, 2)]
    ranks = [
        only(micro_batches(pairs, BatchRule("packed", 8, "first_fit_decreasing", 4, 4, 2, rank), CPU))
        for rank in (0, 1)
    ]
    assert [batch.tokens.tolist() for batch in ranks] == [[[1, 4, 1, 0]], [[2, 3, 2, 0]]]
    assert [batch.predicts_response.int().tolist() for batch in ranks] == [[[0, 1, 1, 0]], [[1, 1, 1, 0]]]
    assert [batch.targets.tolist() for batch in ranks] == [[5, 2], [3, 4, 3]]
    assert [batch.own.tolist() for batch in ranks if batch.own is not None] == [[2, 3], [0, 1, 4]]
    assert [batch.num_tokens for batch in ranks] == [5, 5]


def test_context_parallel_ranks_share_padded_rows() -> None:
    rule = [BatchRule("number", 2, "first_fit_decreasing", 4, 4, 2, rank) for rank in (0, 1)]
    ranks = [only(micro_batches([sequence(2, 3), sequence(1, 2)], part, CPU)) for part in rule]
    assert [batch.tokens.tolist() for batch in ranks] == [[[1, 4], [1, 0]], [[2, 3], [2, 0]]]
    assert [batch.targets.tolist() for batch in ranks] == [[5, 2], [3, 4, 3]]


@pytest.mark.parametrize(
    ("layout", "sequence_multiple", "row_multiple"),
    [
        ({}, 1, 1),
        ({"tensor_model_parallel_size": 4}, 1, 1),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 1, 4),
        ({"context_parallel_size": 2}, 4, 4),
        # A rank's positions: half of the row, in pairs of parts, and a third of them on each tensor-parallel rank.
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 3, "sequence_parallel": True}, 4, 12),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True}, 4, 8),
    ],
)
def test_lengths_are_padded_to_what_the_layout_needs(
    layout: dict[str, int], sequence_multiple: int, row_multiple: int
) -> None:
    policy = PolicyConfig(model_name="unused", sequence_packing={"enabled": True}, megatron_cfg=layout)
    rule = BatchRule.of(policy, train=True, context_rank=0)
    assert (rule.sequence_multiple, rule.row_multiple) == (sequence_multiple, row_multiple)


def test_dynamic_rows_are_rounded_and_their_budget_is_in_force() -> None:
    """8 inputs become 10; budget 25 has room for two rows of 10."""
    policy = PolicyConfig(
        model_name="unused",
        max_total_sequence_length=10,
        dynamic_batching={"enabled": True, "train_mb_tokens": 25, "logprob_mb_tokens": 40, "sequence_length_round": 5},
    )
    pairs = [sequence(4, 5)] * 5
    sizes = {
        train: [
            tuple(batch.tokens.shape)
            for batch in micro_batches(pairs, BatchRule.of(policy, train=train, context_rank=0), CPU)
        ]
        for train in (True, False)
    }
    assert sizes == {True: [(2, 10), (2, 10), (1, 10)], False: [(4, 10), (1, 10)]}


def test_without_a_budget_the_defaults_are_numbers_of_sequences() -> None:
    policy = PolicyConfig(model_name="unused")
    assert [BatchRule.of(policy, train=train, context_rank=0).limit for train in (True, False)] == [64, 128]
