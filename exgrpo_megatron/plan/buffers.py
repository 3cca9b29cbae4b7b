"""The buffers in which Megatron-Core's data parallelism keeps gradients, and what of them a rank's optimizer owns.

With the distributed optimizer every parameter begins at a multiple of 64 numbers, and every bucket ends at a multiple
of 128 and of the ranks that share it; each rank owns an equal, contiguous part of each bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo_megatron.plan.parameters import Parameter

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128


@dataclass(frozen=True)
class Buffer:
    """Where the parameters of a stage lie, in numbers from the start."""

    buckets: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]
    """First number of each parameter and the one after its last."""

    @property
    def elements(self) -> int:
        """With the padding."""
        return self.buckets[-1][1]

    def owned(self, rank: int, ranks: int) -> int:
        """Numbers of parameters, without padding, in rank `rank`'s part of the buckets."""
        parts = []
        for start, end in self.buckets:
            part = (end - start) // ranks
            parts.append((start + rank * part, start + (rank + 1) * part))
        return sum(max(0, min(end, stop) - max(start, begin)) for start, end in self.spans for begin, stop in parts)


def plain_buffer(parameters: Sequence[Parameter]) -> Buffer:
    """Without the distributed optimizer: one parameter after the other."""
    spans: list[tuple[int, int]] = []
    end = 0
    for parameter in parameters:
        spans.append((end, end + parameter.elements))
        end += parameter.elements
    return Buffer(((0, end),), tuple(spans))


def shared_buffer(parameters: Sequence[Parameter], ranks: int, bucket_size: int | None) -> Buffer:
    """With the distributed optimizer over `ranks` ranks.

    A bucket is closed once it has `bucket_size` numbers (None: one bucket); an embedding tied across stages has one of
    its own.
    """
    multiple = math.lcm(ranks, _BUCKET_ALIGNMENT)
    buckets: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    bucket_start = end = 0
    for parameter in reversed(parameters):  # gradients are ready in this order
        start = _round_up(end, _PARAMETER_ALIGNMENT)
        if parameter.shared_embedding and spans and end > bucket_start:
            start = _round_up(start, multiple)
            buckets.append((bucket_start, start))
            bucket_start = start
        end = start + parameter.elements
        spans.append((start, end))
        if parameter.shared_embedding or (bucket_size is not None and end - bucket_start >= bucket_size):
            end = _round_up(end, multiple)
            buckets.append((bucket_start, end))
            bucket_start = end
    if end > bucket_start:
        buckets.append((bucket_start, _round_up(end, multiple)))
    return Buffer(tuple(buckets), tuple(spans))


def overlap_bucket_size(ranks: int) -> int:
    """Megatron-Core's size of a bucket where gradients are summed during the backward pass."""
    return max(40_000_000, 1_000_000 * ranks)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
