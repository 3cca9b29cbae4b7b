"""What every checkpoint looks like to a reader: Hugging Face names, one tensor at a time, whatever the files are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as it is stored, known without reading its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(ABC):
    """An open checkpoint of one model. Made by `exgrpo_conversion.formats.open_source`; a context manager.

    Its tensors are those of `mapping.manifest(arch)`, checked by name and shape when it was opened: no more, no fewer.
    """

    path: Path
    """What was opened."""
    format: str
    """Name of the format found: one of `formats.FORMATS`."""
    arch: Architecture
    config: dict[str, Any]
    """The model's config.json."""
    config_folder: Path
    """The folder with that config.json, and with the tokenizer if there is one."""

    dropped_rows: int = 0
    """Rows of a Megatron vocabulary that are padding and are not read."""

    @abstractmethod
    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor by Hugging Face name, in the order in which the files are read from begin to end."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU in the dtype of the file; the caller's for as long as it is wanted.

        Raises:
            ModelFolderError: there is none of this name, or its file is damaged.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""

    def names(self) -> list[str]:
        """The keys of `infos`."""
        return list(self.infos())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order of `names`; holds one Megatron parameter at a time at most."""
        for name in self.names():
            yield name, self.read(name)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
