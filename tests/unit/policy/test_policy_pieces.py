"""Runs of a parameter's elements as boxes, which a checkpoint can hold."""

import math

import pytest
import torch

from exgrpo_megatron.policy.pieces import boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (5, 1), (1, 6)])
def test_the_boxes_of_a_run_are_its_elements_in_order(shape):
    """Every run of a small tensor, against plain slices of the elements numbered row by row."""
    numbered = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbered.numel() + 1):
        for end in range(start, numbered.numel() + 1):
            found = [
                numbered[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))].flatten()
                for box in boxes(shape, start, end)
            ]
            assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, end))
            assert len(found) <= 2 * len(shape) - 1


def test_a_run_of_a_matrix_is_a_rest_of_a_row_whole_rows_and_a_beginning_of_one():
    assert list(boxes((4, 10), 7, 32)) == [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]
    assert list(boxes((4, 10), 12, 15)) == [((1, 2), (1, 3))]
    assert list(boxes((4, 10), 10, 30)) == [((1, 0), (2, 10))]
