"""Megatron checkpoints of one file a rank: `mp_rank_TP[_PP]/model_optim_rng.pt`.

The files are pickles with objects of the program that wrote them. Reading them can run code that is hidden there, so
it is done with leave only (`unpickle`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion.claims import Claims
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.mapping import EMBEDDING, OUTPUT_LAYER, is_sharded, unshard
from exgrpo_conversion.source import TensorInfo
from exgrpo_conversion.torch_dist import bare_name, local_name

RANK_FILE = "model_optim_rng.pt"


class LegacyFiles:
    """The parameters of a folder with one subfolder for each tensor- and pipeline-parallel rank.

    Files are memory-mapped: optimizer states in them are never read.

    Raises:
        ModelFolderError: a rank is missing or damaged, or the ranks do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _rank_files(folder)
        self._ranks = {place: _load(path) for place, path in self._files.items()}
        first = self._files[0, 0]
        arguments = getattr(self._ranks[0, 0].get("args"), "__dict__", {})
        self.claims = Claims(str(first), arguments)
        version = self._ranks[0, 0].get("checkpoint_version", 0)
        if not isinstance(version, int | float) or version < 3.0:
            raise ModelFolderError(
                f"{first} has checkpoint_version {version!r}: the rows of its query-key-value weights are ordered in "
                "another way than in version 3, which alone is supported"
            )
        self._parts = self._collect()

    def parameters(self) -> Mapping[str, TensorInfo]:
        return {name: _info(name, parts) for name, parts in self._parts.items()}

    def read(self, name: str) -> Tensor:
        parts = self._parts[name]
        if not is_sharded(name) and any(not torch.equal(part, parts[0]) for part in parts[1:]):
            raise ModelFolderError(f"{self.folder}: the tensor-parallel ranks have different values of {name}")
        return unshard(name, parts).clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._parts.clear()
        self._ranks.clear()

    def _collect(self) -> dict[str, list[Tensor]]:
        """Parameter of the whole model -> its part on each tensor-parallel rank.

        Stages hold consecutive layers; with several chunks a stage, first all stages' first chunks. So layers are
        counted, and nothing is taken for granted about how many a stage has.
        """
        tp_size = 1 + max(tp for tp, _ in self._ranks)
        stages = sorted({stage for _, stage in self._ranks})
        parts: dict[str, list[Tensor]] = {}
        before = 0
        for chunk in self._chunks():
            for stage in stages:
                weights = [self._weights(tp, stage, chunk) for tp in range(tp_size)]
                before += self._add(parts, weights, before, f"stage {stage}, {chunk}")
        return parts

    def _chunks(self) -> list[str]:
        found = [key for key in self._ranks[0, 0] if isinstance(key, str) and re.fullmatch(r"model\d*", key)]
        if not found:
            raise ModelFolderError(f"{self._files[0, 0]} holds no model")
        return sorted(found, key=lambda key: int(key[5:] or 0))

    def _weights(self, tp: int, stage: int, chunk: str) -> dict[str, Tensor]:
        """By the name within the chunk, without the wrapping, and without states of Transformer Engine."""
        content = self._ranks[tp, stage].get(chunk)
        if not isinstance(content, Mapping):
            raise ModelFolderError(f"{self._files[tp, stage]} holds no {chunk}")
        return {
            local_name(bare_name(name)): value
            for name, value in content.items()
            if isinstance(value, Tensor) and not name.endswith("_extra_state")
        }

    def _add(self, parts: dict[str, list[Tensor]], weights: list[dict[str, Tensor]], before: int, where: str) -> int:
        """Add one chunk, whose layers come after `before` others; returns how many it has."""
        if any(rank.keys() != weights[0].keys() for rank in weights):
            raise ModelFolderError(f"{self.folder}: the tensor-parallel ranks of {where} hold different parameters")
        layers = set()
        for name in weights[0]:
            of_name = [rank[name] for rank in weights]
            whole = name
            if match := _LAYER.match(name):
                layers.add(int(match[1]))
                whole = f"decoder.layers.{before + int(match[1])}.{name[match.end() :]}"
            known = parts.setdefault(whole, of_name)
            if known is not of_name:
                self._check_copy(whole, known, of_name, where)
        if layers != set(range(len(layers))):
            raise ModelFolderError(f"{self.folder}: {where} has the layers {sorted(layers)}, not 0 and following")
        return len(layers)

    def _check_copy(self, name: str, known: list[Tensor], again: list[Tensor], where: str) -> None:
        if name not in (EMBEDDING, OUTPUT_LAYER) or not all(map(torch.equal, known, again)):
            raise ModelFolderError(f"{self.folder}: {where} has {name} a second time, with other values")


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def is_legacy(folder: Path) -> bool:
    """Whether the folder has rank files of this format."""
    return any(folder.glob(f"mp_rank_0*/{RANK_FILE}"))


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor-parallel rank, pipeline stage) -> file; all ranks of a rectangle."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        match = _RANK_FOLDER.fullmatch(path.parent.name)
        if not match or int(match[3] or 0):
            raise ModelFolderError(f"{path}: only tensor- and pipeline-parallel ranks are supported, no experts")
        place = (int(match[1]), int(match[2] or 0))
        if place in found:
            raise ModelFolderError(f"{path} and {found[place]} are of the same rank")
        found[place] = path
    tp_size, pp_size = (1 + max(place[axis] for place in found) for axis in (0, 1))
    missing = [(tp, pp) for tp in range(tp_size) for pp in range(pp_size) if (tp, pp) not in found]
    if missing:
        tp, pp = missing[0]
        raise ModelFolderError(f"{folder} lacks the file of tensor-parallel rank {tp}, pipeline stage {pp}")
    return found


def _info(name: str, parts: list[Tensor]) -> TensorInfo:
    """Of the whole; shapes only, nothing is read."""
    whole = unshard(name, [part.to("meta") for part in parts]) if _is_known(name) else parts[0]
    return TensorInfo(tuple(whole.shape), parts[0].dtype)


def _is_known(name: str) -> bool:
    try:
        is_sharded(name)
    except ValueError:
        return False
    return True


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, mmap=True, pickle_module=_Pickles)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ModelFolderError(f"{path} cannot be read: {reason}") from error
    except pickle.UnpicklingError as error:
        raise ModelFolderError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds a {type(content).__name__}, not the state of a rank")
    return content


class _Absent:
    """Stands for an object of a program that is not installed; nothing in it is looked at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def __setstate__(self, state: Any) -> None:
        del state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return _Absent


class _Pickles:
    """What torch wants of a module of pickles."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)
    loads = staticmethod(pickle.loads)
