"""Safetensors shards written one after another, checked tensor by tensor."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from exgrpo_conversion.errors import ModelFolderError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """Collects tensors up to `max_shard_bytes`, then writes them as one file; holds one shard in memory."""

    def __init__(
        self, folder: Path, expected: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None, max_shard_bytes: int
    ) -> None:
        self._folder = folder
        self._expected = expected
        self._convert_to = dtype
        self._dtype = dtype
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shard_names: list[list[str]] = []
        self._seen: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Check one tensor and take a copy of it (the caller may reuse its memory).

        Raises:
            ModelFolderError: the name, shape, dtype or values are not what the manifest allows.
        """
        self._check_name_and_shape(name, tensor)
        # Always a copy: the tensor may be a live parameter or a buffer that the producer fills again.
        tensor = tensor.detach().to("cpu", self._convert_to or tensor.dtype, copy=True).contiguous()
        self._check_dtype_and_values(name, tensor)
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._seen.add(name)
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> torch.dtype:
        """Write the last shard, the final file names and (for several files) the index; return the dtype.

        Raises:
            ModelFolderError: tensors of the manifest were never added.
        """
        missing = [name for name in self._expected if name not in self._seen]
        if missing:
            raise ModelFolderError(f"{len(missing)} tensors were not exported, the first is {missing[0]}")
        assert self._dtype is not None, "set with the first tensor, and no model is without tensors"
        self._flush()
        count = len(self._shard_names)
        files = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, file in enumerate(files):
            os.rename(self._unnamed(number), self._folder / file)
        if count > 1:
            self._write_index(files)
        return self._dtype

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

    def _unnamed(self, number: int) -> Path:
        """Where a shard waits until the number of shards, which is part of every name, is known."""
        return self._folder / f"shard-{number:05d}.safetensors"

    def _flush(self) -> None:
        _save(self._pending, self._unnamed(len(self._shard_names)))
        self._shard_names.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _write_index(self, files: list[str]) -> None:
        weight_map = {name: file for file, names in zip(files, self._shard_names, strict=True) for name in names}
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise ModelFolderError for a tensor with NaN or infinity in it."""
    # Extremes carry both along; isfinite would need several temporaries of the size of the tensor.
    if not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ModelFolderError(f"tensor {name} has NaN or infinite values as {tensor.dtype}")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """save_file with the file mode of the umask (it sets 0600) and with OSError for operating-system faults."""
    with path.open("xb") as placeholder:
        mode = os.fstat(placeholder.fileno()).st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors reports a full disk as text only: "... I/O error: No space left on device (os error 28)".
        match = re.search(r"\(os error (\d+)\)", str(error))
        code = int(match[1]) if match else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error
    os.chmod(path, mode)
