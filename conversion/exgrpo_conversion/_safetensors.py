"""Headers of safetensors files: checked against the size of the file before anything is mapped, and made for writing.

A file is 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, first and last byte), and the
data, in which tensors follow each other without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exgrpo_conversion.config_file import MAX_JSON_BYTES, parse_json
from exgrpo_conversion.errors import ModelFolderError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_PREFIX = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor: `start` is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file in the order of their data; only the header is read.

    Raises:
        ModelFolderError: the header or an entry of it does not fit the size of the file; names file and tensor.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX), "little")
        if size < _PREFIX or length > min(size - _PREFIX, MAX_JSON_BYTES):
            raise _damaged(path, size, f"a header of {length} bytes is announced")
        text = file.read(length)
    content = parse_json(text, f"the header of {path}")
    content.pop(_METADATA, None)
    entries = {name: _entry(name, value, _PREFIX + length, path, size) for name, value in content.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    end = _PREFIX + length
    for name, entry in entries.items():
        if entry.start != end:
            raise _damaged(path, size, f"tensor {name} begins at byte {entry.start} and the one before ends at {end}")
        end += entry.nbytes
    if end != size:
        raise _damaged(path, size, f"its tensors end at byte {end}")
    return entries


def make_header(tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file with these tensors (name -> shape) one after another, and where each one goes."""
    described: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end, starts = 0, {}
    for name, shape in tensors.items():
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data are aligned as the format asks
    base = _PREFIX + len(text)
    entries = {name: Entry(dtype, shape, base + starts[name]) for name, shape in tensors.items()}
    return len(text).to_bytes(_PREFIX, "little") + text, entries


def _entry(name: str, value: Any, base: int, path: Path, size: int) -> Entry:
    """One entry of the header; `base` is the first byte of the data."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, size, f"tensor {name} is not described by dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ModelFolderError(f"{path}: tensor {name} has the dtype {str(code)[:80]}, known are {', '.join(DTYPES)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise _damaged(path, size, f"tensor {name} has a shape or place that is none")
    entry = Entry(DTYPES[code], tuple(shape), base + offsets[0])
    if entry.nbytes != offsets[1] - offsets[0]:
        raise _damaged(
            path, size, f"tensor {name} needs {entry.nbytes} bytes and has bytes {offsets[0]} to {offsets[1]}"
        )
    return entry


_MAX_DIMENSIONS = 16


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _damaged(path: Path, size: int, reason: str) -> ModelFolderError:
    return ModelFolderError(
        f"{path} is no complete safetensors file ({size} bytes; {reason}): download or export it again"
    )
