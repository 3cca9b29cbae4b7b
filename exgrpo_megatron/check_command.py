"""`exgrpo convert --check`: whether two checkpoints hold the same model, and what differs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from exgrpo_conversion.architecture import UnsupportedModelError
from exgrpo_conversion.compare import SAME, Comparison, TensorFinding, compare
from exgrpo_conversion.compare_files import FileFinding
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.formats import FORMATS, detect, open_source
from exgrpo_conversion.source import Source, TensorInfo
from exgrpo_megatron.errors import CheckpointError, ConfigError

MAX_ROWS = 40
"""Tensors in the table; JSON has them all."""

_FILE_WIDTH = 240


def refuse_options(context: typer.Context, allowed: set[str]) -> None:
    """Raise ConfigError for an option of the command line that would do nothing."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--{name.replace('_', '-')} is for writing, and --check writes nothing: leave it out")


def check_and_report(first: Path, second: Path, *, config: Path | None, unpickle: bool, as_json: bool) -> bool:
    """Print how two checkpoints compare, and return whether they are the same model.

    Raises:
        CheckpointError: one of them cannot be read: files are missing or damaged, or do not fit their own config.
    """
    with _opened(first, config, unpickle) as mine, _opened(second, config, unpickle) as its:
        try:
            found = _compare(mine, its)
        except (ModelFolderError, OSError) as error:
            raise CheckpointError(f"cannot compare {first} with {second}: {error}") from error
        if as_json:
            sys.stdout.write(json.dumps(found.as_json(), indent=1, allow_nan=False) + "\n")
        else:
            _print(found, mine, its)
    return found.same


def _opened(path: Path, config: Path | None, unpickle: bool) -> Source:
    """A config is for the Megatron side, or sides: a Hugging Face folder has its own."""
    try:
        needs_config = detect(path).format not in ("hf", "hf_bin")
        return open_source(path, config=config if needs_config else None, unpickle=unpickle)
    except (ModelFolderError, UnsupportedModelError, OSError) as error:
        raise CheckpointError(f"{path} cannot be compared: {error}") from error


def _compare(first: Source, second: Source) -> Comparison:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("comparing", total=sum(info.nbytes for info in second.infos().values()))
        return compare(first, second, lambda nbytes: bar.advance(task, nbytes))


def _print(found: Comparison, first: Source, second: Source) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)  # names are whole, for grep
    lines = [f"{label}  {it.path} ({FORMATS[it.format]})" for label, it in (("first ", first), ("second", second))]
    counts = Counter(finding.verdict for finding in found.tensors)
    lines.append("tensors: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    tensors = [finding for finding in found.tensors if finding.verdict not in SAME]
    if tensors:
        console.print(_tensor_table(tensors[:MAX_ROWS]))
    if len(tensors) > MAX_ROWS:
        console.print(f"and {len(tensors) - MAX_ROWS} more tensors, which --json lists", highlight=False)
    others = [*found.config, *found.tokenizer]
    if others:
        console.print(_file_table(others))
    verdict = "the same model" if found.same else f"not the same model: {len(found.faults)} faults"
    console.print(verdict, highlight=False)


def _tensor_table(findings: list[TensorFinding]) -> Table:
    table = Table(
        "tensor", "verdict", "first", "second", "values", "max abs", "max rel", "at", box=None, pad_edge=False
    )
    for column in table.columns[:2]:
        column.overflow = "fold"
    for finding in findings:
        it = finding.difference
        numbers = ("", "", "", "") if it is None else (
            f"{it.count}", _number(it.max_abs), _number(it.max_rel), f"{list(it.where)}: {it.first:g}, {it.second:g}"
        )  # fmt: skip
        name = f"{finding.name}\n  {finding.hint}" if finding.hint else finding.name
        table.add_row(name, finding.verdict, _stored(finding.first), _stored(finding.second), *numbers)
    return table


def _file_table(findings: list[FileFinding]) -> Table:
    table = Table("config, tokenizer", "first", "second", "", box=None, pad_edge=False)
    for finding in findings:
        verdict = "different" if finding.is_fault else "changes nothing"
        table.add_row(finding.name, finding.first, finding.second, verdict)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _stored(info: TensorInfo | None) -> str:
    return "-" if info is None else f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
