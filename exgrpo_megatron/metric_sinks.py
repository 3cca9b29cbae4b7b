"""The sinks that metrics are written to, and reading them back.

Metrics are written by rank 0, once a step, from values already reduced over ranks.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from exgrpo_megatron.errors import DataError, UserError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.metrics import find_metric

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Somewhere metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one step; NaN and infinities may be among them."""

    def truncate_after(self, step: int) -> None:
        """Forget what was written for later steps: a resumed run writes them again."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class AnswerRow:
    """One answer of a step, for people to read."""

    question_id: str
    question: str
    answer: str
    gold: str
    reward: float
    correct: bool
    replayed: bool
    tokens: int


class RunSink(MetricSink, Protocol):
    """A tool of others that has the run, with more of it than metrics."""

    title: str
    where: str
    """An address or a folder."""
    look: str
    """The same, with the command that shows or sends it."""

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        """Keep some answers of a step; comes before its metrics."""

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        """The last step is done: keep what came of the run."""

    def close(self, *, failed: bool = False) -> None: ...

    def lost(self) -> list[str]:
        """A line for each kind of thing it did not get, once it is closed."""


class JsonlSink:
    """One JSON object a line, `{"step": n, name: value, ...}`, handed over when `write` returns; NaN and inf as null.

    One step may have several lines (an evaluation, then the step); `read_metrics` joins them.
    A half-written last line, left by a killed process, is dropped on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {path.parent}: {error.strerror}; set logger.log_dir") from error
        if path.exists() and not _ends_with_newline(path):
            replace_text(path, "".join(_whole_lines(path)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; raises UserError where the disk refuses it."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise UserError(
                f"cannot write metrics to {self.path}: {error.strerror}; make room, then run again"
            ) from error

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and a half-written last line; the file is replaced in one move."""
        if self.path.exists():
            lines = _whole_lines(self.path)
            kept = [line for number, line in enumerate(lines, 1) if _parse(self.path, number, line)["step"] <= step]
            replace_text(self.path, "".join(kept))

    def close(self) -> None:
        return None


class TensorBoardSink:
    """TensorBoard scalars under the same names; NaN and infinities are left to TensorBoard, which marks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._writer = SummaryWriter(log_dir=str(self.folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """TensorBoard files only grow: a new one is begun that tells readers to hide later steps of the older ones."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricsLogger:
    """Checks metrics and hands them to every sink."""

    def __init__(self, sinks: Sequence[MetricSink], tools: Sequence[RunSink] = ()) -> None:
        """`tools` get the metrics too, after `sinks`."""
        self._sinks, self._tools = (*sinks, *tools), tuple(tools)
        self.nonfinite_values = 0
        """NaN and infinities seen so far; each is also warned of by name."""

    def write(self, step: int, metrics: Mapping[str, float | np.number]) -> None:
        """Write the metrics of `step`. Unknown names and values that are no real number are bugs (AssertionError)."""
        values = {name: _checked(name, value) for name, value in metrics.items()}
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            self.nonfinite_values += 1
            logger.warning("metric %s of step %d is %s", name, step, values[name])
        for sink in self._sinks:
            sink.write(step, values)

    def truncate_after(self, step: int) -> None:
        """Forget later steps in every sink; call it once on resume, with the step of the checkpoint."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def answers(self, step: int, rows: Callable[[], Sequence[AnswerRow]]) -> None:
        """Hand some answers of a step to the tools, before its metrics; `rows` is asked only where there are any."""
        if self._tools:
            found = rows()
            for tool in self._tools:
                tool.answers(step, found)

    def finish(self, summary: Callable[[], Mapping[str, float | str]], files: Sequence[Path]) -> None:
        """Tell the tools what came of the run."""
        if self._tools:
            found = summary()
            for tool in self._tools:
                tool.finish(found, files)

    def where(self) -> dict[str, str]:
        """Where the tools have the run."""
        return {tool.title: tool.where for tool in self._tools}

    def look(self) -> dict[str, str]:
        """The same, with the command that shows or sends it."""
        return {tool.title: tool.look for tool in self._tools}

    def lost(self) -> list[str]:
        """What the tools did not get, once they are closed."""
        return [line for tool in self._tools for line in tool.lost()]

    def close(self, *, failed: bool = False) -> None:
        """`failed`: an error ended the run."""
        for sink in self._sinks[: len(self._sinks) - len(self._tools)]:
            sink.close()
        for tool in self._tools:
            tool.close(failed=failed)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One dict a step, by step, with its "step"; several lines of a step are joined, the later value standing.

    A value written as null is NaN. A half-written last line (the run is writing) is left out. Raises DataError with the
    line for any other line that is no JSON object with a step.
    """
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(_whole_lines(path), 1):
        record = _parse(path, number, line)
        values = {name: math.nan if value is None else value for name, value in record.items()}
        steps.setdefault(record["step"], {}).update(values)
    return [steps[step] for step in sorted(steps)]


def _checked(name: str, value: float | np.number) -> float:
    assert find_metric(name) is not None, f"unknown metric {name!r}: add it to METRICS"
    assert isinstance(value, Real), f"metric {name} must be a real number, found {type(value).__name__}"
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _whole_lines(path: Path) -> list[str]:
    """The lines of the file with their newline; one without it was cut off and is left out."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    return [line + "\n" for line in text.split("\n")[:-1]]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error.msg}); remove the line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(f"{path}, line {number}: not an object with a whole-number step; remove the line")
    return record
