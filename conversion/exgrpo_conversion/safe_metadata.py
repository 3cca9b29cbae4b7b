"""The table of contents of a Megatron `torch_dist` checkpoint, read without unpickling anything.

torch writes it as a pickle (`.metadata`) and reads it with `pickle.load`, which lets its author run code here. This
reads the same bytes as plain data, and checks every name, offset and size against the files before it is believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exgrpo_conversion._pickle_records import Global, Record, read_records
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**29
"""Refused above: 64 bytes or so for each piece of each tensor make some MB for the largest models."""


@dataclass(frozen=True)
class StoredChunk:
    """One piece of a tensor: its place in the whole, and the bytes of a file that hold it as `torch.save` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a checkpoint (`shape` includes the layers, where Megatron stacks them) and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors of a checkpoint's model by their keys, and the keys of what is never read.

    Left out are pickled objects (such as the `_extra_state` of Transformer Engine) and the state of the optimizer.
    """

    tensors: dict[str, StoredTensor]
    left_out: tuple[str, ...]


def read_metadata(folder: Path) -> CheckpointIndex:
    """The contents of a `torch_dist` folder; no code of the file runs, and no bytes of tensors are read.

    Raises:
        ModelFolderError: it is missing, damaged, asks for a class that has no business there, names a file outside the
            folder or one that is missing or too short, or its pieces do not make up the tensors.
    """
    path = file_inside(folder, METADATA_FILE)
    if (size := path.stat().st_size) > MAX_METADATA_BYTES:
        raise ModelFolderError(f"{path} has {size} bytes; at most {MAX_METADATA_BYTES} are read")
    root = read_records(path.read_bytes(), _ADMITTED, str(path))
    if not isinstance(root, Record) or root.name != f"{_METADATA}.Metadata":
        raise ModelFolderError(f"{path} is damaged: it holds no checkpoint metadata")
    return _Reader(folder, path).index(root)


_METADATA = "torch.distributed.checkpoint.metadata"

_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip

_ADMITTED = frozenset(
    {
        *_DTYPES,
        *(
            f"{_METADATA}.{name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        # What each rank wrote, which Megatron-Core leaves in the file; not used.
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        # Left in checkpoints by older versions of Megatron-Core; their contents are not used.
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    }
)  # fmt: skip

_Place = tuple[str, int, int]
"""File name, first byte, number of bytes."""


class _Reader:
    """Turns the records of one file into checked values; every fault names the file and the key."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder = folder
        self._path = path
        self._files: dict[str, tuple[Path, int]] = {}

    def index(self, root: Record) -> CheckpointIndex:
        entries, places = root.value("state_dict_metadata"), root.value("storage_data")
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise self._fault("it lacks the list of tensors or that of their places")
        where = dict(self._place(index, info) for index, info in places.items())
        tensors, left_out = {}, []
        for key, entry in entries.items():
            if not isinstance(key, str) or not isinstance(entry, Record):
                raise self._fault("an entry is no named tensor")
            if entry.name.endswith(".BytesStorageMetadata") or "optimizer" in key.split("."):
                left_out.append(key)
            else:
                tensors[key] = self._tensor(key, entry, where)
        return CheckpointIndex(tensors, tuple(left_out))

    def _place(self, index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...]], _Place]:
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise self._fault("a place of a tensor is no record")
        key, offset = index.value("fqn"), index.value("offset")
        if not isinstance(key, str):
            raise self._fault("a place belongs to no tensor")
        file, start, length = (info.value(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not _is_count(start) or not _is_count(length):
            raise self._fault(f"the place of {key} is no file, start and length")
        if info.value("transform_descriptors"):
            raise self._fault(f"{key} is stored compressed or encrypted, which is not supported")
        return (key, () if offset is None else self._sizes(key, offset)), (file, start, length)

    def _tensor(self, key: str, entry: Record, where: dict[tuple[str, tuple[int, ...]], _Place]) -> StoredTensor:
        shape = self._sizes(key, entry.value("size"))
        chunks = entry.value("chunks")
        if not isinstance(chunks, list) or not chunks:
            raise self._fault(f"{key} has no pieces")
        dtype = self._dtype(key, entry.value("properties"))
        stored = StoredTensor(dtype, shape, tuple(self._chunk(key, chunk, dtype, where) for chunk in chunks))
        self._check_pieces(key, stored)
        return stored

    def _chunk(
        self, key: str, chunk: Any, dtype: torch.dtype, where: dict[tuple[str, tuple[int, ...]], _Place]
    ) -> StoredChunk:
        if not isinstance(chunk, Record):
            raise self._fault(f"a piece of {key} is no record")
        offsets, sizes = (self._sizes(key, chunk.value(name)) for name in ("offsets", "sizes"))
        if (key, offsets) not in where:
            raise self._fault(f"it does not say where the piece of {key} at {offsets} is stored")
        file, start, length = where[key, offsets]
        path, file_bytes = self._file(key, file)
        needed = math.prod(sizes) * dtype.itemsize
        if needed > length:
            raise self._fault(f"the piece of {key} at {offsets} needs {needed} bytes, and {length} are stored")
        if start + length > file_bytes:
            raise ModelFolderError(
                f"{path} has {file_bytes} bytes and is cut off: {key} at {offsets} ends at byte {start + length}"
            )
        return StoredChunk(offsets, sizes, path, start, length)

    def _file(self, key: str, name: str) -> tuple[Path, int]:
        if name not in self._files:
            path = file_inside(self._folder, name, f"{self._path} places {key}")
            self._files[name] = path, path.stat().st_size
        return self._files[name]

    def _dtype(self, key: str, properties: Any) -> torch.dtype:
        state = properties.state if isinstance(properties, Record) else None
        if not isinstance(state, tuple) or not state or not isinstance(state[0], Global):
            raise self._fault(f"{key} has no dtype")
        if state[0].name not in _DTYPES:
            raise self._fault(f"{key} has the dtype {state[0].name}, which is not supported")
        return _DTYPES[state[0].name]

    def _sizes(self, key: str, value: Any) -> tuple[int, ...]:
        """A `torch.Size`: made of one tuple or list of counts."""
        if not isinstance(value, Record) or value.name != "torch.Size" or len(value.args) > 1:
            raise self._fault(f"{key} has a size that is none")
        counts = value.args[0] if value.args else ()
        if not isinstance(counts, tuple | list) or len(counts) > _MAX_DIMENSIONS or not all(map(_is_count, counts)):
            raise self._fault(f"{key} has a size that is none")
        return tuple(counts)

    def _check_pieces(self, key: str, tensor: StoredTensor) -> None:
        """The pieces form a grid without holes: as many as the grid has cells, none twice, each filling its cell."""
        cuts = [sorted({chunk.offsets[dim : dim + 1] for chunk in tensor.chunks}) for dim in range(len(tensor.shape))]
        ends = [_next_cut(cut, size) for cut, size in zip(cuts, tensor.shape, strict=True)]
        seen = {chunk.offsets for chunk in tensor.chunks}
        whole = len(seen) == len(tensor.chunks) == math.prod(map(len, cuts))
        if not whole or any(not _fills_cell(chunk, ends) for chunk in tensor.chunks):
            raise self._fault(f"the {len(tensor.chunks)} pieces of {key} do not make up a tensor {tensor.shape}")

    def _fault(self, text: str) -> ModelFolderError:
        return ModelFolderError(f"{self._path} is damaged: {text}")


_MAX_DIMENSIONS = 16


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _next_cut(cuts: Sequence[tuple[int, ...]], size: int) -> dict[int, int]:
    """First index of a piece along one dimension -> the index behind it."""
    firsts = [first for cut in cuts for first in cut]
    return dict(zip(firsts, [*firsts[1:], size], strict=True)) if firsts[:1] == [0] else {}


def _fills_cell(chunk: StoredChunk, ends: Sequence[dict[int, int]]) -> bool:
    if len(chunk.offsets) != len(ends) or len(chunk.sizes) != len(ends):
        return False
    return all(
        end.get(first) == first + size for first, size, end in zip(chunk.offsets, chunk.sizes, ends, strict=True)
    )
