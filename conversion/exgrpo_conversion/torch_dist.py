"""Megatron's distributed checkpoints (`torch_dist`) as whole parameters: no process group, no Megatron.

Layers are stacked in the tables of these checkpoints, `decoder.layers.mlp.linear_fc1.weight` being
[layers, rows, columns], unless they were saved as not homogeneous; both are read, and only one layer at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.mapping import LOCAL_SPEC_NAME
from exgrpo_conversion.safe_metadata import METADATA_FILE, StoredTensor, read_metadata
from exgrpo_conversion.source import TensorInfo
from exgrpo_conversion.stored_tensors import read_tensor

FORMAT_FILE, COMMON_FILE, TRACKER_FILE = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"


class TorchDistFiles:
    """The parameters of one folder with a `.metadata` file.

    Raises:
        ModelFolderError: it is damaged, or holds tensors that are no part of a dense decoder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, tuple[StoredTensor, int | None]] = {}
        for key, stored in read_metadata(folder).tensors.items():
            for name, layer in _parameters(key, stored):
                if name in self._places:
                    raise ModelFolderError(f"{folder / METADATA_FILE} has {name} twice, the second time as {key}")
                self._places[name] = (stored, layer)

    def parameters(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(stored.shape if layer is None else stored.shape[1:], stored.dtype)
            for name, (stored, layer) in self._places.items()
        }

    def read(self, name: str) -> Tensor:
        return read_tensor(*self._places[name])

    def close(self) -> None:
        self._places.clear()


def iteration_folder(root: Path) -> Path:
    """The checkpoint that the tracker file of a Megatron folder points to.

    Raises:
        ModelFolderError: the tracker says nothing sensible, or there is no such folder.
    """
    tracker = root / TRACKER_FILE
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{tracker} cannot be read: {error}") from error
    if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelFolderError(f"{tracker} says {text[:40]!r}: neither an iteration nor release")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ModelFolderError(f"{tracker} says {text}, but there is no folder {folder}")
    return folder


def local_name(name: str) -> str:
    """A parameter's name under the local spec: Transformer Engine has other names for two norms of a layer."""
    match = _LAYER.fullmatch(name)
    if not match or match[2] not in LOCAL_SPEC_NAME:
        return name
    return f"{match[1]}{LOCAL_SPEC_NAME[match[2]]}"


def stacked_key(name: str) -> tuple[str, int | None]:
    """The key under which Megatron saves a parameter, named as Transformer Engine does, and its layer."""
    match = _LAYER.fullmatch(name)
    if not match:
        return name, None
    saved = _SAVED_NAME.get(match[2], match[2])
    return f"decoder.layers.{saved}", int(match[1].split(".")[2])


_LAYER = re.compile(r"(decoder\.layers\.\d+\.)(.+)")
_STACKED = re.compile(r"decoder\.layers\.(\D.*)")
# Models are wrapped (data parallel, mixed precision), and NeMo saves the wrapping with them.
_WRAPPERS = re.compile(r"(?:(?:model|module)(?:_?\d+)?\.)+")
_SAVED_NAME = {local: saved for saved, local in LOCAL_SPEC_NAME.items()}


_MAX_LAYERS = 10_000


def bare_name(key: str) -> str:
    """A key without the names of what is wrapped around the model."""
    match = _WRAPPERS.match(key)
    return key[match.end() :] if match else key


def _parameters(key: str, stored: StoredTensor) -> list[tuple[str, int | None]]:
    """The parameters that a tensor of a checkpoint holds, and the layer of each if it stacks several."""
    name = bare_name(key)
    stacked = _STACKED.fullmatch(name)
    if not stacked:
        return [(local_name(name), None)]
    if not stored.shape or stored.shape[0] > _MAX_LAYERS:
        raise ModelFolderError(f"{key} has the shape {stored.shape}, whose first dimension is no number of layers")
    layers = range(stored.shape[0])
    return [(local_name(f"decoder.layers.{layer}.{stacked[1]}"), layer) for layer in layers]
