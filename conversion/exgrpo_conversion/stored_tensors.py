"""Tensors that `torch.save` wrote into a part of a file: their bytes are copied once, and no pickle is run.

`torch.load(weights_only=True)` would read each piece into memory first, uncompress what claims to be small, and enlarge
a storage to the shape that a file asks for. Here the archive must be uncompressed and the shape fit the bytes.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion._mapped import as_values, map_part
from exgrpo_conversion._pickle_records import PERSISTENT, Global, Record, read_records
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.safe_metadata import StoredChunk, StoredTensor


def read_tensor(tensor: StoredTensor, layer: int | None = None) -> Tensor:
    """A whole tensor, or one layer of a tensor that stacks them.

    What lies in one piece of the file is mapped, else the pieces are copied together, each of them mapped meanwhile.

    Raises:
        ModelFolderError: a piece is damaged, or holds another dtype or shape than the table of contents says.
    """
    first, shape = (0, tensor.shape) if layer is None else (layer, (1, *tensor.shape[1:]))
    end = first + shape[0] if shape else 1
    chunks = [it for it in tensor.chunks if not shape or (it.offsets[0] < end and first < it.offsets[0] + it.sizes[0])]
    if len(chunks) == 1 and chunks[0].sizes == shape:
        whole = _bytes_of(chunks[0], tensor.dtype)
        return as_values(whole.contiguous().flatten(), tensor.dtype, shape if layer is None else shape[1:])
    out = torch.empty(shape, dtype=tensor.dtype)
    place = out.unsqueeze(-1).view(torch.uint8)
    for chunk in chunks:
        found, offsets = _bytes_of(chunk, tensor.dtype, whole=layer is None), list(chunk.offsets)
        if layer is not None:
            found, offsets[0] = found.narrow(0, layer - chunk.offsets[0], 1), 0
        target = place
        for dim, offset in enumerate(offsets):
            target = target.narrow(dim, offset, found.shape[dim])
        target.copy_(found)
    return out if layer is None else out[0]


@dataclass(frozen=True)
class _Layout:
    """How the elements of a tensor lie in its storage; counted in elements."""

    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _bytes_of(chunk: StoredChunk, dtype: torch.dtype, *, whole: bool = True) -> Tensor:
    """The bytes of a piece, mapped: [*its sizes, bytes of an element]."""
    where = f"{chunk.file}, bytes {chunk.start} to {chunk.start + chunk.length},"
    part = map_part(chunk.file, chunk.start, chunk.length, whole=whole or chunk.sizes[:1] == (1,))
    try:
        archive = zipfile.ZipFile(io.BufferedReader(_View(part.numpy().data)))
        layout = _layout(_small_record(archive, "data.pkl", where), dtype, where)
        start, length = _record(archive, f"data/{layout.storage}", where)
        order = _small_record(archive, "byteorder", where, b"little")
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{where} hold no whole tensor: {error}") from error
    last = layout.offset + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
    if layout.size != chunk.sizes or order != b"little" or (0 not in layout.size and last >= length // dtype.itemsize):
        raise ModelFolderError(f"{where} hold no little-endian tensor {chunk.sizes} with all its values")
    strides = [stride * dtype.itemsize for stride in layout.stride]
    return part[start : start + length].as_strided(
        (*layout.size, dtype.itemsize), (*strides, 1), start + layout.offset * dtype.itemsize
    )


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
_REBUILD = "torch._utils._rebuild_tensor_v2"
_ADMITTED = frozenset({*_STORAGES, _REBUILD, "collections.OrderedDict"})


def _layout(pickled: bytes, dtype: torch.dtype, where: str) -> _Layout:
    """What data.pkl says: `_rebuild_tensor_v2(persistent id of the storage, offset, size, stride, ...)`."""
    tensor = read_records(pickled, _ADMITTED, where)
    if not isinstance(tensor, Record) or tensor.name != _REBUILD or len(tensor.args) < 4:
        raise ValueError("no tensor")
    storage, offset, size, stride = tensor.args[:4]
    if not isinstance(storage, Record) or storage.name != PERSISTENT or len(storage.args) != 5:
        raise ValueError("a tensor without storage")
    kind, name = storage.args[1], storage.args[2]
    if not isinstance(kind, Global) or _STORAGES.get(kind.name) != dtype:
        raise ValueError(f"another dtype than {dtype}")
    if not isinstance(name, str) or not _are_counts([offset]) or not _are_counts(size) or not _are_counts(stride):
        raise ValueError("no layout of a tensor")
    if len(size) != len(stride):
        raise ValueError("no layout of a tensor")
    return _Layout(name, offset, tuple(size), tuple(stride))


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple | list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _record(archive: zipfile.ZipFile, name: str, where: str) -> tuple[int, int]:
    """First byte and length of an uncompressed record; names in the archive begin with a folder of any name."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise ValueError(f"{len(found)} records {name}")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ModelFolderError(f"{where} are compressed, which torch never does")
    file = archive.fp
    assert file is not None, "the archive is open"
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise ValueError(f"no record {name} where it should begin")
    start = info.header_offset + _LOCAL_HEADER + int.from_bytes(header[26:28], "little")
    start += int.from_bytes(header[28:30], "little")
    if start + info.file_size > file.seek(0, io.SEEK_END):
        raise ValueError(f"the record {name} is cut off")
    return start, info.file_size


_LOCAL_HEADER = 30
_MAX_SMALL_RECORD = 2**16


def _small_record(archive: zipfile.ZipFile, name: str, where: str, default: bytes | None = None) -> bytes:
    """The bytes of a record other than the values; old versions of torch wrote no `byteorder`."""
    if default is not None and not any(info.filename.endswith(f"/{name}") for info in archive.infolist()):
        return default
    start, length = _record(archive, name, where)
    if length > _MAX_SMALL_RECORD:
        raise ValueError(f"the record {name} has {length} bytes")
    file = archive.fp
    assert file is not None, "the archive is open"
    file.seek(start)
    return file.read(length)


class _View(io.RawIOBase):
    """A part of a file as a file; what is read of it is copied, the rest is not."""

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
