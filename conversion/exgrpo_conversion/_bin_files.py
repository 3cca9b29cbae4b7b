"""`pytorch_model.bin` files: pickles, of which only plain tensors are taken (torch's weights_only), memory-mapped."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from exgrpo_conversion.errors import ModelFolderError
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
        self._tensors: dict[str, Tensor] = {}
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
        """One whole tensor, of its own memory."""
        if name not in self._tensors:
            raise ModelFolderError(f"{self.folder} has no tensor {name}")
        return self._tensors[name].clone(memory_format=torch.contiguous_format)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names and shapes with a manifest; as `HFReader.check`."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        check_tensors(self.folder, shapes, self.get, expected)

    def close(self) -> None:
        """Unmap the files."""
        self._tensors.clear()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, mapped and not read.

    Raises:
        ModelFolderError: it is missing, damaged, or not a dictionary of plain tensors.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: the model folder is incomplete") from None
    except pickle.UnpicklingError as error:
        raise ModelFolderError(
            f"{path} is refused: it holds other things than tensors, and reading it could run code of its author; "
            "take the safetensors files of this model"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).split("\n")[0]
        raise ModelFolderError(f"{path} is no complete weights file ({reason}): download it again") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ModelFolderError(f"{path} is no dictionary of tensors")
    return content
