"""Writes Megatron's distributed checkpoint format (`torch_dist`) parameter by parameter: no process group, no Megatron.

What Megatron-Core's own saving gives for a model on one rank: layers stacked under one key, one piece a layer, norms
under Transformer Engine's names, an empty extra state for every module that has one. Megatron cuts it for any layout.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from exgrpo_conversion._archive_writer import write_tensor
from exgrpo_conversion._shards import check_finite
from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.safe_metadata import METADATA_FILE
from exgrpo_conversion.torch_dist import COMMON_FILE, FORMAT_FILE, stacked_key


class TorchDistWriter:
    """Writes the parameters it is given into files of `max_file_bytes` (or one parameter, where it is larger) and a few
    kB; holds none of them.

    `prefix` stands before every key ("module." in NeMo). An interrupted write leaves no `.metadata`, without which
    nothing takes the folder for a checkpoint.
    """

    def __init__(self, folder: Path, arch: Architecture, max_file_bytes: int, prefix: str = "") -> None:
        self._folder, self._prefix, self._layers = folder, prefix, arch.num_layers
        self._max_file_bytes = max_file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._count = 0
        for key in _extra_states(arch):
            self._add_empty_state(key)

    def add(self, name: str, pieces: Sequence[Tensor]) -> None:
        """Write one whole parameter by its global name, given as contiguous pieces of its rows one after another.

        Raises:
            ModelFolderError: there is NaN or infinity in it.
            OSError: it cannot be written.
        """
        for piece in pieces:
            if piece.numel():
                check_finite(name, piece)
        key, layer = stacked_key(name)
        shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
        sizes = torch.Size(shape if layer is None else (1, *shape))
        size = torch.Size(shape if layer is None else (self._layers, *shape))
        offsets = torch.Size([layer or 0] + [0] * (len(sizes) - 1))
        dtype = pieces[0].dtype
        entry = self._tensors.setdefault(
            self._prefix + key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
        )
        assert isinstance(entry, TensorStorageMetadata), "extra states have names of their own"
        assert (entry.properties.dtype, entry.size) == (dtype, size), f"{name} is not like the other layers"
        entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
        file = self._current(sum(piece.nbytes for piece in pieces))
        place = _StorageInfo(self._name(), file.tell(), write_tensor(file, pieces, tuple(sizes)))
        self._places[MetadataIndex(self._prefix + key, offsets)] = place

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write `common`, the same on every rank, and then what makes the files a checkpoint."""
        self._close()
        torch.save(dict(common), self._folder / COMMON_FILE)
        metadata = Metadata(self._tensors, storage_data=self._places, version=CURRENT_DCP_VERSION)
        metadata.storage_meta = StorageMeta()
        (self._folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
        described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        common_backend = {"common_backend": "torch", "common_backend_version": 1}
        (self._folder / FORMAT_FILE).write_text(json.dumps(described | common_backend), encoding="utf-8")

    def close(self) -> None:
        """Let go of an unfinished file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add_empty_state(self, key: str) -> None:
        """What a module without a state of its own saves: a list of one None, as every rank's object is in a list."""
        self._tensors[self._prefix + key] = BytesStorageMetadata()
        saved = io.BytesIO()
        torch.save([None], saved)
        file = self._current(saved.tell())
        self._places[MetadataIndex(self._prefix + key)] = _StorageInfo(self._name(), file.tell(), saved.tell())
        file.write(saved.getbuffer())

    def _current(self, nbytes: int) -> BinaryIO:
        """The file with room for so many bytes, or a new one."""
        if self._file is not None and self._file.tell() and self._file.tell() + nbytes > self._max_file_bytes:
            self._close()
            self._count += 1
        if self._file is None:
            self._file = (self._folder / self._name()).open("xb")
        return self._file

    def _name(self) -> str:
        """Megatron names its files by rank and number."""
        return f"__0_{self._count}{DEFAULT_SUFFIX}"

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.close()


def _extra_states(arch: Architecture) -> list[str]:
    """Keys of the states that a Megatron model asks for when it loads.

    The first four have one in either spec; the others only with Transformer Engine, and a checkpoint may have more
    than a model asks for.
    """
    modules = [
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "self_attention.core_attention",
        *(["self_attention.q_layernorm", "self_attention.k_layernorm"] if arch.qk_norm else []),
    ]
    layers = range(arch.num_layers)
    return [
        *(f"decoder.layers.{name}._extra_state/shard_{at}_{len(layers)}" for name in modules for at in layers),
        "decoder.final_layernorm._extra_state/shard_0_1",
    ]
