"""A stream of weights cut into pieces that fit one buffer, each checked before it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exgrpo_megatron.rollout.weight_buffers import Buffer

_STORED_TOGETHER = ("self_attn", "mlp")
"""Blocks of which the engine keeps several modules as one; it takes those over when the last of their tensors has come,
and holds no more than a reference until then."""

_ALIGNMENT = 64
"""Bytes: what vector loads and every dtype want."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Placed:
    """A tensor inside the buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""


class BucketPlan:
    """How the weights of one model are cut. Tensors that the engine stores as one are never in different pieces."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, bucket_bytes: int) -> None:
        self.shapes, self.dtype = dict(shapes), dtype
        self._group_bytes: dict[str, int] = {}
        for name in shapes:
            group = group_of(name)
            self._group_bytes[group] = self._group_bytes.get(group, 0) + self.num_bytes(name)
        self.capacity = max(bucket_bytes, *self._group_bytes.values())
        """Bytes of the buffer: those asked for, or the largest tensors that belong together."""

    def num_bytes(self, name: str) -> int:
        """Room of a tensor in the buffer."""
        size = torch.Size(self.shapes[name]).numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def group_bytes(self, name: str) -> int:
        """Room of a tensor and of those that the engine stores it with."""
        return self._group_bytes[group_of(name)]


def check_manifest(announced: Shapes, expected: Shapes) -> None:
    """Raise ValueError, listing every difference, where the actor's weights are not the engine's."""
    problems = [f"missing: {name}" for name in expected if name not in announced]
    problems += [f"unknown: {name}" for name in announced if name not in expected]
    problems += [
        f"misshapen: {name} is {list(announced[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in announced and tuple(announced[name]) != tuple(shape)
    ]
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"the actor's weights do not fit the engine's model:\n  {listed}")


def send(
    weights: Iterable[tuple[str, Tensor]], plan: BucketPlan, buffer: Buffer, deliver: Callable[[list[Placed]], None]
) -> None:
    """Copy the weights into `buffer` piece by piece, cast to the plan's dtype, and `deliver` each.

    The stream is read to its end whatever happens, because its producer may be a collective operation.

    Raises:
        ValueError: a tensor is unknown, misshapen, missing, given twice, or apart from those the engine stores it
            with. Earlier pieces were delivered by then.
    """
    stream = iter(weights)
    try:
        for piece in _pieces(stream, plan, buffer):
            deliver(piece)
    finally:
        for _ in stream:
            pass


def _pieces(weights: Iterator[tuple[str, Tensor]], plan: BucketPlan, buffer: Buffer) -> Iterator[list[Placed]]:
    """The buffer's content, each time it is full; the buffer is filled anew when the next is asked for."""
    piece: list[Placed] = []
    room, left, groups = plan.capacity, dict(plan.shapes), [""]
    for name, tensor in weights:
        if left.pop(name, None) != tuple(tensor.shape):
            raise ValueError(f"the weight {name}, {list(tensor.shape)}, is unknown, misshapen, or was given before")
        if (group := group_of(name)) != groups[-1]:
            if group in groups:
                raise ValueError(f"{name} comes apart from the weights that the engine stores it with")
            groups.append(group)
            if plan.group_bytes(name) > room:
                yield piece
                piece, room = [], plan.capacity
        placed = Placed(name, tuple(tensor.shape), plan.capacity - room)
        view(buffer.tensor, placed, plan.dtype).copy_(tensor)
        piece.append(placed)
        room -= plan.num_bytes(name)
    if left:
        raise ValueError(f"weights are missing: {', '.join(left)}")
    yield piece


def view(buffer: Tensor, placed: Placed, dtype: torch.dtype) -> Tensor:
    """The tensor that lies in the buffer."""
    size = torch.Size(placed.shape).numel() * dtype.itemsize
    return buffer[placed.offset : placed.offset + size].view(dtype).view(placed.shape)


def in_groups(names: Iterable[str]) -> list[str]:
    """The names in an order that `send` takes: those of one group follow each other, groups as they first come."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return [name for group in groups.values() for name in group]


def group_of(name: str) -> str:
    """The module of a Hugging Face weight; the whole block where the engine stores modules of it as one."""
    *block, module, _ = name.split(".")
    return ".".join(block if block and block[-1] in _STORED_TOGETHER else [*block, module])
