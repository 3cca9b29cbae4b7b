"""Writes tensors as `torch.save` does, straight from the memory they lie in and without checksums.

`torch.save` copies every tensor into a buffer and computes a CRC-32, which takes several times as long as writing does;
`torch.load` does not look at it (`torch.serialization.set_crc32_options(False)` writes such files too).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from exgrpo_conversion._shards import bytes_of


def write_tensor(file: BinaryIO, pieces: Sequence[Tensor], shape: tuple[int, ...]) -> int:
    """Append an archive with one tensor, which the contiguous pieces make up one after another; returns its bytes."""
    dtype = pieces[0].dtype
    nbytes = math.prod(shape) * dtype.itemsize
    assert nbytes == sum(piece.nbytes for piece in pieces), f"pieces of {shape} have other bytes"
    archive = _Archive(file)
    archive.add("data.pkl", _pickled(dtype, shape))
    archive.add("byteorder", b"little")
    archive.begin("data/0", nbytes)
    for piece in pieces:
        archive.write(bytes_of(piece))
    archive.add("version", b"3\n")
    return archive.finish()


class _Storage:
    """Stands for the storage of the tensor in its pickle."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, dtype: torch.dtype, count: int) -> None:
        super().__init__(file, protocol=2)
        # As torch.save names it: class of the storage, record, device, elements.
        self._id = ("storage", _STORAGES[dtype], "0", "cpu", count)

    def persistent_id(self, thing: Any) -> Any:
        return self._id if isinstance(thing, _Storage) else None


class _Rebuilt:
    """Pickled as a call of `_rebuild_tensor_v2`, as a tensor is."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __reduce__(self) -> Any:
        strides = tuple(math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        return _rebuild_tensor_v2, (_Storage(), 0, self._shape, strides, False, OrderedDict())


_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    _Pickler(out, dtype, math.prod(shape)).dump(_Rebuilt(shape))
    return out.getvalue()


@dataclass(frozen=True)
class _Record:
    name: bytes
    nbytes: int
    offset: int


class _Archive:
    """An uncompressed zip archive (64-bit, where needed) at the end of a file, with data at multiples of 64 bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._start = file.tell()
        self._written = 0
        self._records: list[_Record] = []

    def add(self, name: str, content: bytes) -> None:
        self.begin(name, len(content))
        self.write(memoryview(content))

    def begin(self, name: str, nbytes: int) -> None:
        """Write the header of a record of so many bytes, which `write` must then be given."""
        record = _Record(f"archive/{name}".encode(), nbytes, self._written)
        self._records.append(record)
        # An extra field that nobody reads pads the header, as torch.save does it.
        extra = _sizes64(nbytes, nbytes) if nbytes >= _LIMIT else b""
        unpadded = self._start + self._written + _LOCAL.size + len(record.name) + len(extra) + _EXTRA.size
        padding = -unpadded % _ALIGNMENT
        extra += _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
        size = _in_32_bits(nbytes)
        header = _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, 0, 0, size, size, len(record.name), len(extra))
        self.write(memoryview(header + record.name + extra))

    def write(self, content: memoryview) -> None:
        self._written += len(content)
        while content:
            content = content[self._file.write(content) :]

    def finish(self) -> int:
        """Write the table of contents; returns the bytes of the archive."""
        table, directory = self._written, b"".join(map(_entry, self._records))
        count, size = len(self._records), len(directory)
        end = b""
        if table >= _LIMIT:
            locator_at = table + size
            end += _END64.pack(b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, size, table)
            end += _LOCATOR64.pack(b"PK\x06\x07", 0, locator_at, 1)
        end += _END.pack(b"PK\x05\x06", 0, 0, count, count, size, _in_32_bits(table), 0)
        self.write(memoryview(directory + end))
        return self._written


_ALIGNMENT = 64
_VERSION = 45  # of the zip format: the first with 64-bit sizes
_LIMIT = 2**32 - 1
_PADDING_ID = 0x4246  # the letters FB, as in torch's files
_LOCAL = struct.Struct("<4s5HIIIHH")
_CENTRAL = struct.Struct("<4s6HIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_EXTRA = struct.Struct("<HH")


def _entry(record: _Record) -> bytes:
    """The entry of a record in the table of contents."""
    is_large, is_far = record.nbytes >= _LIMIT, record.offset >= _LIMIT
    numbers = [record.nbytes] * 2 * is_large + [record.offset] * is_far
    extra = _sizes64(*numbers) if numbers else b""
    size, offset = _in_32_bits(record.nbytes), _in_32_bits(record.offset)
    header = _CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, 0, 0, size, size, len(record.name), len(extra), 0, 0, 0, 0, offset
    )
    return header + record.name + extra


def _in_32_bits(number: int) -> int:
    """The number, or the sign that it stands in an extra field."""
    return number if number < _LIMIT else 2**32 - 1


def _sizes64(*numbers: int) -> bytes:
    """The extra field for numbers of more than 32 bits."""
    return _EXTRA.pack(1, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
