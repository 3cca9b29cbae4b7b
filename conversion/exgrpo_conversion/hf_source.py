"""Hugging Face folders as sources: safetensors, and pickled `.bin` files read without running what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from exgrpo_conversion._bin_files import BinReader
from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.config_file import read_config
from exgrpo_conversion.hf_folder import HFReader
from exgrpo_conversion.mapping import manifest
from exgrpo_conversion.source import Source, TensorInfo


class HFSource(Source):
    """A folder with config.json and weights.

    Raises:
        ModelFolderError: files are missing or damaged, or the tensors are not those of the config.
        UnsupportedModelError: the config is of a model without a mapping.
    """

    def __init__(self, folder: Path, format: str) -> None:
        self.path = self.config_folder = folder
        self.format = format
        self.config = read_config(folder)
        self.arch = Architecture.from_hf_config(self.config)
        self._reader: _Reader = HFReader(folder) if format == "hf" else BinReader(folder)
        expected = manifest(self.arch)
        self._reader.check(expected)
        self._infos = {
            name: TensorInfo(expected[name], self._reader.dtype(name))
            for name in self._reader.names_in_file_order()
            if name in expected
        }

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> Tensor:
        return self._reader.get(name)

    def close(self) -> None:
        self._reader.close()


class _Reader(Protocol):
    def names_in_file_order(self) -> list[str]: ...

    def check(self, expected: dict[str, tuple[int, ...]]) -> None: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def get(self, name: str) -> Tensor: ...

    def close(self) -> None: ...
