"""Megatron checkpoints as sources: their parameters taken apart into Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.claims import Claims, check_claims
from exgrpo_conversion.config_file import read_config
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.mapping import EMBEDDING, OUTPUT_LAYER, hf_names, manifest, megatron_names, to_hf
from exgrpo_conversion.source import Source, TensorInfo

MAX_PADDING = 128 * 128
"""Vocabulary rows above those of config.json: Megatron pads to a multiple of 128 * tensor-parallel ranks."""


class MegatronFiles(Protocol):
    """Whole parameters of a Megatron checkpoint, whatever the ranks that wrote it."""

    def parameters(self) -> Mapping[str, TensorInfo]:
        """By global local-spec name (`decoder.layers.3.input_layernorm.weight`), vocabulary padding included."""

    def read(self, name: str) -> Tensor:
        """One whole parameter in new memory; raises ModelFolderError for a damaged file."""

    def close(self) -> None:
        """Let go of the files."""


class MegatronSource(Source):
    """Reads one Megatron parameter at a time; `tensors` goes from the embedding through the layers.

    Raises:
        ModelFolderError: parameters are missing, unknown or misshapen for the config, or the checkpoint says that it is
            of another model.
        UnsupportedModelError: the config is of a model without a mapping.
    """

    def __init__(self, path: Path, format: str, files: MegatronFiles, config_folder: Path, claims: Claims) -> None:
        self.path, self.format, self.config_folder = path, format, config_folder
        self.config: dict[str, Any] = read_config(config_folder)
        self.arch = Architecture.from_hf_config(self.config)
        self._files = files
        check_claims(self.arch, claims, config_folder)
        self._shapes = manifest(self.arch)
        self._owner = {
            name: parameter for parameter in megatron_names(self.arch) for name in hf_names(self.arch, parameter)
        }
        self.dropped_rows = self._check(files.parameters())
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def infos(self) -> dict[str, TensorInfo]:
        parameters = self._files.parameters()
        return {name: TensorInfo(self._shapes[name], parameters[owner].dtype) for name, owner in self._owner.items()}

    def read(self, name: str) -> Tensor:
        if name not in self._owner:
            raise ModelFolderError(f"{self.path} has no tensor {name}")
        # The tensors of one parameter are mostly asked for one after another.
        if self._last[0] != self._owner[name]:
            self._last = ("", {})  # before the next one is read: only one is held
            self._last = (self._owner[name], self._taken_apart(self._owner[name]))
        return self._last[1][name].clone()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for parameter in megatron_names(self.arch):
            yield from self._taken_apart(parameter).items()

    def close(self) -> None:
        self._files.close()

    def _taken_apart(self, parameter: str) -> dict[str, Tensor]:
        return dict(to_hf(self.arch, parameter, self._files.read(parameter)))

    def _check(self, found: Mapping[str, TensorInfo]) -> int:
        """Compare with the config; returns the vocabulary rows that are padding."""
        expected = megatron_names(self.arch)
        missing = [name for name in expected if name not in found]
        unknown = [name for name in found if name not in expected and not self._is_copy_of_embedding(name, found)]
        misshapen = [
            f"{name} {found[name].shape} instead of {self._shape(name)}"
            for name in expected
            if name in found and not self._fits(name, found[name].shape)
        ]
        faults = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
        text = "; ".join(f"{len(names)} {kind}: {', '.join(names[:4])}" for kind, names in faults.items() if names)
        if text:
            raise ModelFolderError(f"the parameters in {self.path} do not fit {self.config_folder}: {text}")
        self._check_dtypes(found)
        return found[EMBEDDING].shape[0] - self.arch.vocab_size

    def _check_dtypes(self, found: Mapping[str, TensorInfo]) -> None:
        for name, info in found.items():
            if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
                raise ModelFolderError(f"{self.path}: {name} is {info.dtype}; floats of 16 bits or more are supported")

    def _shape(self, name: str) -> tuple[int, ...]:
        parts = [self._shapes[part] for part in hf_names(self.arch, name)]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        expected = self._shape(name)
        if name not in (EMBEDDING, OUTPUT_LAYER) or not shape:
            return shape == expected
        return 0 <= shape[0] - expected[0] < MAX_PADDING and shape[1:] == expected[1:]

    def _is_copy_of_embedding(self, name: str, found: Mapping[str, TensorInfo]) -> bool:
        """Whether this is the output layer of a tied model, which the last pipeline stage may hold again."""
        if name != OUTPUT_LAYER or not self.arch.tied or EMBEDDING not in found:
            return False
        if found[name] != found[EMBEDDING] or not torch.equal(self._files.read(name), self._files.read(EMBEDDING)):
            raise ModelFolderError(
                f"{self.path} has an {OUTPUT_LAYER} other than its embedding, but the config in {self.config_folder} "
                "says that they are tied"
            )
        return True
