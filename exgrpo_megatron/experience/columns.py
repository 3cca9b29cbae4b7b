"""Growing numpy columns: what the index and the table of answers are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 64


class Columns:
    """Named one-dimensional arrays of one length, which grow by a tenth at a time: that is all the room they waste."""

    def __init__(self, **types: Any) -> None:
        self._arrays = {name: np.zeros(_LEAST, dtype) for name, dtype in types.items()}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A view of the column, to be read and written; valid until the next `extend`."""
        return self._arrays[name][: self._length]

    def extend(self, count: int) -> int:
        """Add `count` rows of zeros; returns the first of them."""
        first, self._length = self._length, self._length + count
        room = len(next(iter(self._arrays.values())))
        if self._length > room:
            wanted = max(self._length, room + room // 10)
            for name, old in self._arrays.items():
                new = np.zeros(wanted, old.dtype)
                new[:first] = old[:first]
                self._arrays[name] = new
        return first

    @property
    def nbytes(self) -> int:
        """Allocated, the room for growth included."""
        return sum(array.nbytes for array in self._arrays.values())
