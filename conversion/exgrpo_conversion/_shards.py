"""Safetensors shards written tensor by tensor, each checked and put at once where it belongs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exgrpo_conversion._safetensors import Entry, make_header
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import check_space

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """Writes the tensors of a manifest, given in any order, into files of up to `max_shard_bytes`; holds none of them.

    The manifest says before the first tensor comes which file has which tensor at which byte.
    """

    def __init__(
        self, folder: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None, max_shard_bytes: int
    ) -> None:
        self._folder = folder
        self._expected = expected
        self._dtype = dtype
        self._convert = dtype is not None
        self._max_shard_bytes = max_shard_bytes
        self._places: dict[str, _Place] = {}
        self._open: tuple[str, int] | None = None
        self._seen: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Check one tensor and write it; its memory may be used again when this returns.

        Raises:
            ModelFolderError: the name, shape, dtype or values are not what the manifest allows, or all its tensors
                have no room on the disk.
            OSError: it cannot be written.
        """
        self._check_name_and_shape(name, tensor)
        tensor = tensor.detach().to("cpu", self._dtype if self._convert else tensor.dtype).contiguous()
        self._check_dtype_and_values(name, tensor)
        if not self._places:
            self._begin()
        self._seen.add(name)
        place = self._places[name]
        self._write(place.file, bytes_of(tensor), place.entry.start)

    def finish(self) -> torch.dtype:
        """Write (for several files) the index; return the dtype. The files are not flushed to disk.

        Raises:
            ModelFolderError: tensors of the manifest were never added.
        """
        missing = [name for name in self._expected if name not in self._seen]
        if missing:
            raise ModelFolderError(f"{len(missing)} tensors were not exported, the first is {missing[0]}")
        assert self._dtype is not None, "set with the first tensor, and no model is without tensors"
        self.close()
        if not (self._folder / SINGLE_FILE).exists():
            self._write_index()
        return self._dtype

    def close(self) -> None:
        """Close the last file, whole or not."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _check_name_and_shape(self, name: str, tensor: Tensor) -> None:
        if name not in self._expected:
            raise ModelFolderError(f"tensor {name} does not belong to this model")
        if name in self._seen:
            raise ModelFolderError(f"tensor {name} was exported twice")
        if tuple(tensor.shape) != self._expected[name]:
            raise ModelFolderError(f"tensor {name} has shape {tuple(tensor.shape)} instead of {self._expected[name]}")

    def _check_dtype_and_values(self, name: str, tensor: Tensor) -> None:
        if self._dtype is None and tensor.is_floating_point():
            self._dtype = tensor.dtype
        if tensor.dtype != self._dtype:
            raise ModelFolderError(f"tensor {name} is {tensor.dtype}, others are {self._dtype}: ask for one dtype")
        check_finite(name, tensor)

    def _begin(self) -> None:
        """Share the manifest out over files, and write their headers."""
        assert self._dtype is not None, "set by the tensor that has just been checked"
        total_bytes = sum(map(math.prod, self._expected.values())) * self._dtype.itemsize
        check_space(self._folder, total_bytes)
        shards = _shared_out(self._expected, self._dtype.itemsize, self._max_shard_bytes)
        count = len(shards)
        for number, shapes in enumerate(shards, 1):
            file = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            header, entries = make_header(shapes, self._dtype)
            self._write(file, memoryview(header), 0)
            self._places |= {name: _Place(file, entry) for name, entry in entries.items()}

    def _write(self, file: str, content: memoryview, start: int) -> None:
        descriptor = self._descriptor(file)
        while content:
            try:
                written = os.pwrite(descriptor, content[:_AT_ONCE], start)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._folder / file)) from error
            content, start = content[written:], start + written

    def _descriptor(self, file: str) -> int:
        """One file is open at a time: there may be more of them than a process may open."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, os.open(self._folder / file, os.O_WRONLY | os.O_CREAT, 0o666)
        return self._open[1]

    def _write_index(self) -> None:
        total_bytes = sum(place.entry.nbytes for place in self._places.values())
        weight_map = {name: self._places[name].file for name in sorted(self._places)}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ModelFolderError for a tensor with NaN or infinity in it."""
    # Extremes carry both along; isfinite would need several temporaries of the size of the tensor.
    if not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ModelFolderError(f"tensor {name} has NaN or infinite values as {tensor.dtype}")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, where they lie if it is contiguous."""
    return tensor.flatten().view(torch.uint8).numpy().data


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Place:
    file: str
    entry: Entry


_AT_ONCE = 2**30
"""Bytes in one call: Linux writes 2 GiB at most."""


def _shared_out(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each file, in the order of the manifest; one that is larger than a file has one for itself."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * itemsize
        if shards[-1] and used + nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += nbytes
    return shards
