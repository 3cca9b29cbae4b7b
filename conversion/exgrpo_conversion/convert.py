"""From one checkpoint format to another: one parameter in memory, written aside, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture, padded_vocab_size
from exgrpo_conversion.contexts import HF_FOLDER
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import check_space
from exgrpo_conversion.hf_folder import strange_entries, write_hf_folder
from exgrpo_conversion.mapping import check_tensor_parallel, manifest
from exgrpo_conversion.megatron_folders import RELEASE, MegatronTarget, write_nemo, write_torch_dist
from exgrpo_conversion.source import Source
from exgrpo_conversion.torch_dist import TRACKER_FILE

TARGETS = {
    "hf": "a Hugging Face folder with safetensors",
    "torch_dist": "a distributed checkpoint that Megatron-LM loads",
    "nemo2": "a NeMo 2 folder",
}


@dataclass(frozen=True)
class Target:
    """What a conversion is to write: format, folder, precision and layout."""

    format: str
    """A key of TARGETS."""
    folder: Path
    dtype: torch.dtype | None = None
    """None: that of the source, which must then be one."""
    max_shard_bytes: int = 5 * 10**9
    vocab_divisible_by: int = 128
    """Megatron formats: the vocabulary is padded with zero rows to a multiple of this times `tensor_parallel`."""
    tensor_parallel: int = 1
    overwrite: bool = False


@dataclass(frozen=True)
class Summary:
    """What a conversion has written, and how long it took."""

    files: int
    nbytes: int
    """On disk."""
    tensors: int
    """Hugging Face tensors."""
    dtype: torch.dtype
    seconds: float
    dropped_rows: int
    """Vocabulary padding of the source that was left out."""
    added_rows: int
    """Vocabulary padding in the target."""


def convert(source: Source, target: Target, progress: Callable[[int], object] = lambda _: None) -> Summary:
    """Write the model of `source` in another format (or the same) to `target.folder`.

    `progress` is called with the bytes of each tensor of the source that is done. On any failure the target is as it
    was before.

    Raises:
        ModelFolderError: the target exists without leave to overwrite it, is something else than a checkpoint, or
            holds the source; there is no room; a tensor is damaged, NaN or infinite, or of several dtypes.
        UnsupportedModelError: `tensor_parallel` does not divide the model.
        OSError: a fault of the file system.
    """
    started = time.perf_counter()
    folder = target.folder.resolve()
    check_destination(source, target)
    dtype = target.dtype or _only_dtype(source)
    rows = _rows(source.arch, target)
    check_space(folder, _needed_bytes(source.arch, dtype, rows))
    if target.format == "hf":
        _write_hf(source, target, folder, dtype, progress)
    else:
        write = write_torch_dist if target.format == "torch_dist" else write_nemo
        write(source, _megatron_target(target, folder, dtype, rows, progress))
    files = [path for path in folder.rglob("*") if path.is_file()]
    return Summary(
        files=len(files),
        nbytes=sum(path.stat().st_size for path in files),
        tensors=len(source.names()),
        dtype=dtype,
        seconds=time.perf_counter() - started,
        dropped_rows=source.dropped_rows,
        added_rows=rows - source.arch.vocab_size,
    )


def check_destination(source: Source, target: Target) -> None:
    """Refuse a destination that may not be replaced; raises ModelFolderError."""
    folder = target.folder.resolve()
    for kept in (source.path, source.config_folder):
        if kept.resolve().is_relative_to(folder):
            raise ModelFolderError(f"{target.folder} holds {kept}, which is read: choose another folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ModelFolderError(f"{target.folder} is a file: choose a folder")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    strange = _strange_entries(target.format, folder, names)
    if strange:
        raise ModelFolderError(
            f"{target.folder} is not empty and no checkpoint converted to this format: it has "
            f"{', '.join(strange[:3])}. It is never replaced; choose another folder"
        )
    if not target.overwrite:
        raise ModelFolderError(f"{target.folder} exists: choose another folder, or allow to replace it (--overwrite)")


def _strange_entries(target_format: str, folder: Path, names: set[str]) -> list[str]:
    """What an earlier conversion to this format would not have; empty if it is one."""
    if target_format == "hf":
        return strange_entries(folder)
    if target_format == "nemo2":  # NeMo's own have its objects in context/
        is_one = names == {"weights", "context"} and {it.name for it in folder.glob("context/*")} == {HF_FOLDER}
    else:
        is_one = names == {TRACKER_FILE, RELEASE, HF_FOLDER}
    return [] if is_one else sorted(names)


def _only_dtype(source: Source) -> torch.dtype:
    found: dict[torch.dtype, str] = {}
    for name, info in source.infos().items():
        found.setdefault(info.dtype, name)
    if len(found) > 1:
        listed = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in found.items())
        raise ModelFolderError(f"{source.path} has tensors of several dtypes, {listed}: choose one (--dtype)")
    return next(iter(found))


def _rows(arch: Architecture, target: Target) -> int:
    if target.format == "hf":
        return arch.vocab_size
    check_tensor_parallel(arch, target.tensor_parallel)
    return padded_vocab_size(arch.vocab_size, target.vocab_divisible_by, target.tensor_parallel)


def _needed_bytes(arch: Architecture, dtype: torch.dtype, rows: int) -> int:
    """Of the tensors; what else is written is small beside them."""
    padding = (rows - arch.vocab_size) * arch.hidden_size * (1 if arch.tied else 2)
    return (sum(torch.Size(shape).numel() for shape in manifest(arch).values()) + padding) * dtype.itemsize


def _write_hf(
    source: Source, target: Target, folder: Path, dtype: torch.dtype, progress: Callable[[int], object]
) -> None:
    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source.tensors():
            yield name, tensor
            progress(tensor.nbytes)

    write_hf_folder(
        folder,
        weights(),
        arch=source.arch,
        source_dir=source.config_folder,
        dtype=dtype,
        max_shard_bytes=target.max_shard_bytes,
        replace=target.overwrite,
    )


def _megatron_target(
    target: Target, folder: Path, dtype: torch.dtype, rows: int, progress: Callable[[int], object]
) -> MegatronTarget:
    return MegatronTarget(
        folder=folder,
        dtype=dtype,
        rows=rows,
        vocab_divisible_by=target.vocab_divisible_by,
        tensor_parallel=target.tensor_parallel,
        max_file_bytes=target.max_shard_bytes,
        replace=target.overwrite,
        progress=progress,
    )
