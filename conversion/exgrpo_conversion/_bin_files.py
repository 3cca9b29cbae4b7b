"""`pytorch_model.bin` files: pickles, of which plain tensors are taken without unpickling them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from exgrpo_conversion._pickle_records import Record
from exgrpo_conversion._torch_archive import TENSOR_NAMES, SavedTensor, TorchArchive
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside
from exgrpo_conversion.hf_folder import check_tensors, index_of

SINGLE_BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


class BinReader:
    """Reads tensors one at a time from a folder's `.bin` files.

    Raises:
        ModelFolderError: a file is missing, damaged, outside the folder, holds other things than tensors, or
            disagrees with the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = {} if (folder / SINGLE_BIN).exists() else index_of(folder / BIN_INDEX)
        files = sorted(set(index.values())) or [SINGLE_BIN]
        self._tensors: dict[str, SavedTensor] = {}
        for file in files:
            for name, tensor in load_tensors(folder / file).items():
                if name in self._tensors:
                    raise ModelFolderError(f"{folder}: tensor {name} is in two files, of which one is {file}")
                if index and index.get(name) != file:
                    raise ModelFolderError(f"{folder / file} has tensor {name}, which {BIN_INDEX} does not place there")
                self._tensors[name] = tensor
        for name, file in index.items():
            if name not in self._tensors:
                raise ModelFolderError(f"{folder / BIN_INDEX} places tensor {name} in {file}, which lacks it")

    def names_in_file_order(self) -> list[str]:
        """Every tensor name, in the order of the files."""
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without reading its data."""
        return self._tensors[name].dtype

    def get(self, name: str) -> Tensor:
        """One whole tensor, mapped from the file for as long as it is kept."""
        if name not in self._tensors:
            raise ModelFolderError(f"{self.folder} has no tensor {name}")
        return self._tensors[name].read()

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with a manifest; as `HFReader.check`."""
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_tensors(self.folder, shapes, self.get, expected)

    def close(self) -> None:
        """Forget what is in the files."""
        self._tensors.clear()


def load_tensors(path: Path) -> dict[str, SavedTensor]:
    """The tensors of one file and their places in it.

    Raises:
        ModelFolderError: it is missing, damaged, or not a dictionary of plain tensors.
    """
    with file_inside(path.parent, path.name).open("rb") as file:
        if file.read(1) == _PICKLE:
            raise ModelFolderError(
                f"{path} has the format of torch before 1.6, which is not read: load it with torch.load(weights_only="
                "True) and save it again"
            )
    archive = TorchArchive(path)
    content = archive.content(TENSOR_NAMES)
    items = content.items if isinstance(content, Record) and content.name == "collections.OrderedDict" else content
    if not isinstance(items, dict) or not all(isinstance(name, str) for name in items):
        raise ModelFolderError(f"{path} is no dictionary of tensors")
    return {name: archive.tensor(tensor) for name, tensor in items.items()}


_PICKLE = b"\x80"
"""Begins a pickle; an archive begins otherwise."""
