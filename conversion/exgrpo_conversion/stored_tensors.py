"""Tensors that `torch.save` wrote into a part of a file: their bytes are copied once, and no pickle is run.

`torch.load(weights_only=True)` would read each piece into memory first, uncompress what claims to be small, and enlarge
a storage to the shape that a file asks for. Here the archive must be uncompressed and the shape fit the bytes.
"""

from __future__ import annotations

import io
import mmap
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion._pickle_records import PERSISTENT, Global, Record, read_records
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.safe_metadata import StoredChunk, StoredTensor


class TensorFiles:
    """Reads tensors of a checkpoint piece by piece from memory-mapped files, which stay open until `close`."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, tensor: StoredTensor, layer: int | None = None) -> Tensor:
        """A whole tensor, or one layer of a tensor that stacks them: new memory, and nothing else is held.

        Raises:
            ModelFolderError: a piece is damaged, or holds another dtype or shape than the table of contents says.
        """
        first, shape = (0, tensor.shape) if layer is None else (layer, (1, *tensor.shape[1:]))
        out = torch.empty(shape, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            if layer is None or chunk.offsets[0] <= layer < chunk.offsets[0] + chunk.sizes[0]:
                self._copy(chunk, out, first, only_one=layer is not None)
        return out if layer is None else out[0]

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, chunk: StoredChunk, out: Tensor, first: int, *, only_one: bool) -> None:
        """Copy a piece to its place in `out`, which begins at index `first` of the whole tensor."""
        mapped = self._map(chunk.file)
        found = _values(mapped, chunk, out.dtype)
        # A place is reached by the bytes: where a tensor begins in the file, no alignment is promised.
        place = out.unsqueeze(-1).view(torch.uint8)
        if only_one:
            found = found.narrow(0, first - chunk.offsets[0], 1)
        for dim, (offset, size) in enumerate(zip(chunk.offsets, found.shape[:-1], strict=True)):
            place = place.narrow(dim, 0 if dim == 0 and only_one else offset, size)
        place.copy_(found)
        del found  # the map cannot be closed while a tensor lies in it
        # What was copied need not stay in memory: a whole checkpoint would gather there.
        begin = chunk.start - chunk.start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, begin, chunk.start + chunk.length - begin)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # Private and writable, as torch asks of memory that it may view; nothing is ever written to it.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


@dataclass(frozen=True)
class _Layout:
    """How the elements of a tensor lie in its storage; counted in elements."""

    storage: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _values(mapped: mmap.mmap, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    """The bytes of a piece in the file, [*its sizes, bytes of an element]."""
    where = f"{chunk.file}, bytes {chunk.start} to {chunk.start + chunk.length},"
    with memoryview(mapped) as whole, whole[chunk.start : chunk.start + chunk.length] as part:
        try:
            archive = zipfile.ZipFile(io.BufferedReader(_View(part)))
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
    raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=chunk.start + start, count=max(length, 1))
    strides = [stride * dtype.itemsize for stride in layout.stride]
    return raw.as_strided((*layout.size, dtype.itemsize), (*strides, 1), layout.offset * dtype.itemsize)


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
