"""Which sequences share a micro-batch: by number, by padded size, or packed. Pure functions of the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

PackingAlgorithm = Literal["first_fit_decreasing", "best_fit_decreasing"]


def by_number(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in groups of `size`, longest first so that neighbours have like lengths."""
    order = _longest_first(lengths)
    return [order[start : start + size] for start in range(0, len(order), size)]


def by_padded_size(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in groups whose number times their longest is within `capacity`, from the longest down.

    One that is longer than `capacity` has a group of its own.
    """
    groups: list[list[int]] = []
    for index in _longest_first(lengths):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= capacity:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def packed(lengths: Sequence[int], capacity: int, algorithm: PackingAlgorithm) -> list[list[int]]:
    """Indices in groups whose lengths add up to at most `capacity`; one that is longer has a group of its own.

    From the longest down (ties: lower index first) each goes into the first group that has room, or the one with the
    least room that is enough; a new group is opened where none has. Neither uses more than about 11/9 of the groups
    there must be. Time: sequences times groups.
    """
    groups: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)  # of each group that is open
    for index in _longest_first(lengths):
        fits = np.flatnonzero(room[: len(groups)] >= lengths[index])
        if not len(fits):
            groups.append([])
            number, room[len(groups) - 1] = len(groups) - 1, capacity
        else:
            number = fits[0] if algorithm == "first_fit_decreasing" else fits[np.argmin(room[fits])]
        groups[number].append(index)
        room[number] -= lengths[index]
    return groups


def zigzag(lengths: Sequence[int], size: int, rank: int) -> Int[np.ndarray, " own"]:
    """Positions, in a row of sequences of these lengths, that context-parallel rank `rank` holds, in its order.

    Every length must be a multiple of 2 * size. A sequence is cut into 2 * size equal parts, and rank r holds parts r
    and 2 * size - 1 - r: with a causal mask all ranks then have the same work. This is Megatron's order and
    Transformer Engine's.
    """
    parts = []
    start = 0
    for length in lengths:
        assert length % (2 * size) == 0, (length, size)
        part = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + number * part, start + (number + 1) * part))
        start += length
    return np.concatenate(parts)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
