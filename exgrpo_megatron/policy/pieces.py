"""A run of a parameter's elements, as the distributed optimizer shares them out, as tensors a checkpoint can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, along every axis."""


def pieces(
    sharded: ShardedTensor | ShardedTensorFactory, shape: tuple[int, ...], own: Tensor, start: int, prefix: str
) -> dict[str, ShardedTensor]:
    """Megatron's sharded tensors for `own`, the elements from `start` on of a parameter of `shape`, numbered "0" on.

    `sharded` is the parameter's own. Each piece is a view of `own`, at its place in the whole model's tensor; the key
    of that is the parameter's behind `prefix`. A checkpoint of boxes is read by any other division of the tensor.
    """
    found: list[ShardedTensor] = []
    end, position, taken = start + own.numel(), 0, 0
    for part in _parts(sharded, shape):
        size = math.prod(part.local_shape)
        for offsets, sizes in boxes(part.local_shape, max(start - position, 0), min(end - position, size)):
            data = own[taken : taken + math.prod(sizes)]
            taken += data.numel()
            found.append(_piece(part, offsets, sizes, data, prefix))
        position += size
    assert (position, taken) == (math.prod(shape), own.numel()), (position, taken, shape, own.shape)
    return {str(number): piece for number, piece in enumerate(found)}


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Boxes that hold the elements `start` to `end` of a tensor of `shape`, row by row, in their order."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        yield from _in_row(shape, last, start, end)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], number: int, start: int, end: int) -> Iterator[Box]:
    before = number * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - before, end - before):
        yield (number, *offsets), (1, *sizes)


def _parts(sharded: ShardedTensor | ShardedTensorFactory, shape: tuple[int, ...]) -> list[ShardedTensor]:
    """The tensors a parameter is saved as, which have its elements one after another; they hold no data of their own.

    A gated MLP keeps two matrices in one parameter.
    """
    if isinstance(sharded, ShardedTensorFactory):
        return list(nested_values(replace(sharded, data=torch.empty(shape, device="meta")).build()))
    return [sharded]


def _piece(
    part: ShardedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], data: Tensor, prefix: str
) -> ShardedTensor:
    stacked = part.prepend_axis_num  # axes that the parameter does not have, such as that of the layers
    place: tuple[Any, ...] = tuple(
        base + offset for base, offset in zip(part.global_offset[stacked:], offsets, strict=True)
    )
    sizes = (*(1,) * stacked, *sizes)
    return replace(
        part,
        key=f"{prefix}.{part.key}",
        data=data.view(sizes),
        dtype=data.dtype,
        local_shape=sizes,
        global_offset=(*part.global_offset[:stacked], *place),
        prepend_axis_num=0,
        axis_fragmentations=None,  # pieces are no grid
        replica_id=(*part.replica_id[:-1], 0),  # the last counts data-parallel ranks, and no two keep the same element
    )
