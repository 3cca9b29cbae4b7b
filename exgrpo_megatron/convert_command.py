"""`exgrpo convert`: a checkpoint from one format to another."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from exgrpo_conversion.architecture import UnsupportedModelError
from exgrpo_conversion.convert import Summary, Target, check_destination, convert
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.formats import FORMATS, open_source
from exgrpo_conversion.source import Source
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.stop import ended_by_sigterm

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def make_target(
    to: str,
    folder: Path,
    dtype: str | None,
    max_shard_size: str,
    vocab_divisible_by: int,
    tensor_parallel: int,
    overwrite: bool,
) -> Target:
    """What the options of the command ask for.

    Raises:
        ConfigError: a dtype or size that is none.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: one of {', '.join(_DTYPES)}")
    return Target(
        format=to,
        folder=folder,
        dtype=None if dtype is None else _DTYPES[dtype],
        max_shard_bytes=_size_in_bytes(max_shard_size),
        vocab_divisible_by=vocab_divisible_by,
        tensor_parallel=tensor_parallel,
        overwrite=overwrite,
    )


def convert_and_report(path: Path, target: Target, *, config: Path | None, unpickle: bool) -> None:
    """Convert with a progress bar on a terminal, and print what was done.

    Raises:
        CheckpointError: it cannot be converted; the destination is as it was.
    """
    console = Console()
    try:
        with ended_by_sigterm(), open_source(path, config=config, unpickle=unpickle) as source:
            check_destination(source, target)
            summary = _convert(source, target, console)
            lines = _lines(source, target, summary)
    except (ModelFolderError, UnsupportedModelError, OSError) as error:
        raise CheckpointError(f"{path} cannot be converted: {error}") from error
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _convert(source: Source, target: Target, console: Console) -> Summary:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=sum(info.nbytes for info in source.infos().values()))
        return convert(source, target, lambda nbytes: bar.advance(task, nbytes))


def _lines(source: Source, target: Target, summary: Summary) -> list[str]:
    dtype = str(summary.dtype).removeprefix("torch.")
    per_second = summary.nbytes / max(summary.seconds, 1e-9) / 1e9
    lines = [
        f"{source.path} is {FORMATS[source.format]}, {source.arch.family}, {source.arch.num_layers} layers",
        f"{summary.tensors} tensors in {dtype}, {summary.files} files, {summary.nbytes / 1e9:.3f} GB in "
        f"{summary.seconds:.1f} s ({per_second:.2f} GB/s)",
    ]
    if source.dropped_rows:
        lines.append(
            f"left out: {source.dropped_rows} rows of padding above the vocabulary of {source.arch.vocab_size}"
        )
    if summary.added_rows:
        lines.append(f"added: {summary.added_rows} rows of zeros above the vocabulary of {source.arch.vocab_size}")
    return [*lines, f"written to {target.folder}"]


def _size_in_bytes(text: str) -> int:
    """A size such as 5GB (decimal) or 512MiB (binary)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = match[2].upper() if match else None
    nbytes = int(float(match[1]) * _UNITS[unit]) if match and unit in _UNITS else 0
    if nbytes <= 0:
        raise ConfigError(f"--max-shard-size {text}: a size above 0 such as 5GB or 512MiB")
    return nbytes
