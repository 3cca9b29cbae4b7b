"""How two tensors differ, in pieces: temporaries do not grow with the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 2**22
"""Elements compared at once."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Where two tensors of one shape have other values."""

    count: int
    """Values that differ."""
    max_abs: float | None
    """Largest absolute difference; None where one side is no number (NaN)."""
    max_rel: float | None
    """Largest difference over the value of the first; None as above, or where the first is 0 and the second is not."""
    where: tuple[int, ...]
    """Index of the largest absolute difference, or of the first that is no number."""
    first: float
    second: float
    """The two values there."""


def difference(first: Tensor, second: Tensor) -> Difference | None:
    """None if the two are the same bit for bit, once the finer is rounded to the dtype of the coarser."""
    mine, its = first.flatten(), second.flatten()
    total = _Total()
    for start, a, b in _unequal_pieces(mine, its):
        total.add(start, a.view(_BITS[a.itemsize]) != b.view(_BITS[a.itemsize]), a.double(), b.double())
    if total.count == 0:
        return None
    where = torch.unravel_index(torch.tensor(total.where), first.shape)
    return Difference(
        count=total.count,
        max_abs=_or_none(total.max_abs),
        max_rel=_or_none(total.max_rel),
        where=tuple(int(index) for index in where),
        first=float(mine[total.where]),
        second=float(its[total.where]),
    )


def are_same(first: Tensor, second: Tensor) -> bool:
    """Whether `difference` is None; ends at the first difference."""
    return next(_unequal_pieces(first.flatten(), second.flatten()), None) is None


def resembles(first: Tensor, second: Tensor) -> str:
    """Whether a matrix is another one transposed, or has its rows in another order; "" for neither."""
    if first.dim() != 2 or first.dtype != second.dtype:
        return ""
    if first.shape[0] == first.shape[1] and torch.equal(first.t(), second):
        return "it is the transpose of that"
    if torch.equal(_row_marks(first).sort().values, _row_marks(second).sort().values):
        return "it has the rows in another order than that"
    return ""


def _unequal_pieces(first: Tensor, second: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Index of the first element, and both pieces in the coarser dtype."""
    dtype = max(first.dtype, second.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    bits = _BITS[dtype.itemsize]
    for start in range(0, first.numel(), _PIECE):
        a, b = (it[start : start + _PIECE].to(dtype).contiguous() for it in (first, second))
        if not torch.equal(a.view(bits), b.view(bits)):
            yield start, a, b


class _Total:
    def __init__(self) -> None:
        self.count, self.where = 0, 0
        self.max_abs, self.max_rel = -1.0, -1.0

    def add(self, start: int, differs: Tensor, a: Tensor, b: Tensor) -> None:
        self.count += int(differs.sum())
        gap = (a - b).abs().where(differs, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest, index = gap.max(0)
        if float(largest) > self.max_abs:
            self.max_abs, self.where = float(largest), start + int(index)
        # Of zeros of two signs the gap is 0, and so is the relative one.
        relative = (gap / a.abs()).where(gap > 0, 0.0)
        self.max_rel = max(self.max_rel, float(relative.max()))


def _or_none(value: float) -> float | None:
    return value if value < float("inf") else None


def _row_marks(matrix: Tensor) -> Tensor:
    """A number for each row, the same for equal rows wherever they stand."""
    weights = torch.arange(1, matrix.shape[1] + 1, dtype=torch.float64)
    rows = max(1, _PIECE // max(1, matrix.shape[1]))
    return torch.cat([part.double() @ weights for part in matrix.split(rows)])
