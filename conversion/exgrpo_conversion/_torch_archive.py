"""Files that `torch.save` wrote, or parts of files: what is in them as plain data, and tensors as places to map.

`torch.load(weights_only=True)` would uncompress what claims to be small, enlarge a storage to the shape that a file
asks for, and read whole pieces into memory. Here archives must be uncompressed, shapes fit the bytes, and nothing runs.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion._mapped import as_values, map_part
from exgrpo_conversion._pickle_records import PERSISTENT, Global, Record, read_records
from exgrpo_conversion.errors import ModelFolderError

MAX_PICKLE_BYTES = 32 * 2**20
"""Refused above: what describes 10,000 tensors has 3 MB."""

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
TENSOR_NAMES = frozenset({*_STORAGES, _TENSOR, _PARAMETER, "collections.OrderedDict"})
"""What the pickle of tensors alone asks for."""


@dataclass(frozen=True)
class SavedTensor:
    """Where a tensor lies in a file; strides in elements."""

    path: Path
    start: int
    """Its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def map_bytes(self, *, whole: bool = True) -> Tensor:
        """Its bytes [*shape, bytes of an element], mapped; `whole` as for `map_part`."""
        if 0 in self.shape:
            return torch.empty((*self.shape, self.dtype.itemsize), dtype=torch.uint8)
        strides = [stride * self.dtype.itemsize for stride in self.stride]
        part = map_part(self.path, self.start, (_last(self.shape, self.stride) + 1) * self.dtype.itemsize, whole=whole)
        return part.as_strided((*self.shape, self.dtype.itemsize), (*strides, 1), part.storage_offset())

    def read(self) -> Tensor:
        """The tensor, mapped from the file where its values lie in order."""
        return as_values(self.map_bytes().contiguous().flatten(), self.dtype, self.shape)


class TorchArchive:
    """The archive in `length` bytes of a file from `start` on (None: all of it).

    Raises:
        ModelFolderError: it is none, is cut off, compressed, or of another byte order.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self._path, self._start = path, start
        length = path.stat().st_size if length is None else length
        self.where = f"{path}, bytes {start} to {start + length},"
        self._part = map_part(path, start, length, whole=False)
        try:
            self._file = io.BufferedReader(_View(self._part.numpy().data))
            archive = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise self._damaged(f"they hold no whole archive ({error})") from error
        # Names begin with a folder, which may have any name.
        self._infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(self._infos) != len(archive.infolist()):
            raise self._damaged("a record is there twice")
        if "byteorder" in self._infos and self._read("byteorder", 16) != b"little":
            raise self._damaged("their values are not little-endian")

    def content(self, admitted: Collection[str] | None) -> Any:
        """What was saved, as `read_records` gives it; tensors are records for `tensor`."""
        return read_records(self._read("data.pkl", MAX_PICKLE_BYTES), admitted, self.where)

    def tensor(self, record: Any) -> SavedTensor:
        """The tensor that a record of `content` describes: `_rebuild_tensor_v2(storage, offset, size, stride, ...)`.

        Raises:
            ModelFolderError: it describes none, or one that does not fit the bytes of its storage.
        """
        if isinstance(record, Record) and record.name == _PARAMETER and record.args:
            record = record.args[0]
        if not isinstance(record, Record) or record.name != _TENSOR or len(record.args) < 4:
            raise self._damaged("they hold something else than a tensor")
        storage, offset, shape, stride = record.args[:4]
        dtype, name = self._storage(storage)
        if not _are_counts((offset,)) or not _are_counts(shape) or not _are_counts(stride) or len(shape) != len(stride):
            raise self._damaged("a tensor has no shape")
        first, length = self._place(name)
        if math.prod(shape) and (offset + _last(shape, stride) + 1) * dtype.itemsize > length:
            raise self._damaged(f"a tensor of shape {tuple(shape)} is larger than its {length} bytes")
        return SavedTensor(
            self._path, self._start + first + offset * dtype.itemsize, dtype, tuple(shape), tuple(stride)
        )

    def _storage(self, record: Any) -> tuple[torch.dtype, str]:
        """Dtype and record of a storage: persistent id ("storage", class, name, device, count)."""
        if not isinstance(record, Record) or record.name != PERSISTENT or len(record.args) != 5:
            raise self._damaged("a tensor has no storage")
        kind, name = record.args[1:3]
        if not isinstance(kind, Global) or kind.name not in _STORAGES or not isinstance(name, str):
            raise self._damaged(f"a tensor is stored as {getattr(kind, 'name', 'something')}, which is not supported")
        return _STORAGES[kind.name], f"data/{name}"

    def _place(self, name: str) -> tuple[int, int]:
        """First byte in the archive and length of a record."""
        info = self._infos.get(name)
        if info is None:
            raise self._damaged(f"the record {name!r:.80} is missing")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise self._damaged("they are compressed, which torch never does")
        self._file.seek(max(info.header_offset, 0))
        header = self._file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise self._damaged(f"the record {name!r:.80} is not where it should begin")
        names = sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        first = info.header_offset + _LOCAL_HEADER + names
        if first + info.file_size > self._part.numel():
            raise self._damaged(f"the record {name!r:.80} is cut off")
        return first, info.file_size

    def _read(self, name: str, most: int) -> bytes:
        first, length = self._place(name)
        if length > most:
            raise self._damaged(f"the record {name} has {length} bytes, at most {most} are read")
        return self._part[first : first + length].numpy().tobytes()

    def _damaged(self, reason: str) -> ModelFolderError:
        return ModelFolderError(f"{self.where} cannot be read: {reason}")


_LOCAL_HEADER = 30


def _last(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Index of the last element, counted from the first."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple | list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


class _View(io.RawIOBase):
    """Memory as a file; what is read of it is copied, the rest is not."""

    def __init__(self, part: memoryview) -> None:
        self._part = part
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._part)}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._part[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
