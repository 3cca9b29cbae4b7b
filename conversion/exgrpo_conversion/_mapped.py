"""Parts of files as memory, which is given back with the last tensor that lies in it.

A part is mapped for each tensor, not a file for all: the pages of a file that is read from begin to end would otherwise
all be this process's until the end.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor


def map_part(path: Path, start: int, length: int, *, whole: bool = True) -> Tensor:
    """The bytes [length] of a file from `start` on; changing them does not change the file.

    `whole`: all will be read, so they are brought in at once; a page fault for each 64 kB would take longer than
    copying them does.
    """
    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    skipped = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        # Private and writable, as torch asks of memory that it may view.
        mapped = mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_COPY, offset=start - skipped)
    if whole:
        with suppress(OSError):  # older than Linux 5.14: then they come as they are touched
            mapped.madvise(_POPULATE_READ)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=skipped, count=length)


def as_values(part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Mapped bytes as the values that they are; copied only where they begin between two values."""
    if part.data_ptr() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(shape)


_POPULATE_READ = 22
"""MADV_POPULATE_READ, which Python 3.11 has no name for."""
