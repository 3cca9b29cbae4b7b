"""What happened to each question of a run: an append-only file, one JSON object a step.

A line is `{"step": 7, "questions": {"q1": [["tried", 2, 4], ["stored", 31]], ...}}`: of every question of the step its
events, in their order, each as its kind and the values of `FIELDS`. A value that was not finite is null. Its last key,
`crc32`, is the checksum of the bytes of the line before it; lines of earlier versions have none.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import DataError, UserError

HISTORY_FILE = "experience_history.jsonl"
"""In the folder of a run."""

FIELDS: dict[str, tuple[str, ...]] = {
    "prefilled": ("count",),
    "tried": ("count", "of"),
    "left_out": ("count", "reason"),
    "stored": ("answer",),
    "replayed": ("answer", "mean_ratio", "max_ratio"),
    "retired": (),
    "returned": (),
    "evicted": ("answer", "reason"),
    "lost": ("count",),
}
"""Kind of event -> which fields of `Event` it has.

prefilled: answers taken from experience.prefill_path, before the first step. tried: a group with `count` of `of`
correct, the replayed answer included. left_out: correct answers that were not stored. stored, replayed, evicted: one
answer. retired: solved by every answer; its stored answers are forgotten. returned: no longer retired. lost: stored
answers that were damaged.
"""


@dataclass(slots=True)
class Event:
    """Something that happened to a question in a step; which fields say something, `FIELDS` has. It is never changed;
    see `types` for why it is not frozen."""

    question_id: str
    kind: str
    count: int = 0
    of: int = 0
    answer: int = -1
    """Serial of the stored answer: its place in the order in which the run met its correct answers."""
    mean_ratio: float = math.nan
    """Mean of w over the tokens of the replayed answer, before its optimiser step."""
    max_ratio: float = math.nan
    reason: str = ""
    """left_out: duplicate, not_collected, truncated, or what is wrong with it; evicted: the key of the limit."""

    def describe(self) -> str:
        """One line for people."""
        return _DESCRIPTIONS[self.kind].format(**asdict(self))


_DESCRIPTIONS = {
    "prefilled": "{count} answers taken over before the first step",
    "tried": "tried: {count} of {of} correct",
    "left_out": "not stored: {count}, {reason}",
    "stored": "stored answer {answer}",
    "replayed": "replayed answer {answer}: w {mean_ratio:.4g} on average, {max_ratio:.4g} at most",
    "retired": "retired: every answer correct",
    "returned": "brought back",
    "evicted": "evicted answer {answer}: experience.{reason}",
    "lost": "lost {count} answers to damaged files",
}


class HistoryWriter:
    """Appends the events of a step as one line, handed over when `write` returns; for the one process that writes.

    A half-written last line, left by a killed process, is cut off on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_file():
            _cut(path, lambda *_: True)

    def write(self, step: int, events: Iterable[Event]) -> None:
        """Append the step; raises UserError where the disk refuses it."""
        by_question: dict[str, list[list[Any]]] = {}
        for event in events:
            values = [_plain(getattr(event, name)) for name in FIELDS[event.kind]]
            by_question.setdefault(event.question_id, []).append([event.kind, *values])
        line = json.dumps(
            {"step": step, "questions": by_question}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        checked = line.encode()[:-1]
        try:
            with self.path.open("ab") as file:
                file.write(checked + b"%s%d}\n" % (_CHECKSUM, zlib.crc32(checked)))
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}; make room, or set logger.experience_history to false"
            ) from error

    def truncate_after(self, step: int) -> None:
        """Cut off the lines of later steps: a run that goes on writes them again.

        Raises:
            DataError: a line is none of this format.
        """
        if self.path.is_file():
            _cut(self.path, lambda number, line: _step_of(self.path, number, line) <= step)


def read_history(path: Path, question_id: str | None = None) -> Iterator[tuple[int, list[Event]]]:
    """(step, events) of every step, of one question if it is named; a line at a time, in the order of the steps.

    A half-written last line (the run is writing) is left out.

    Raises:
        DataError: a line is none of this format; names the file and the line.
    """
    wanted = None if question_id is None else json.dumps(question_id, ensure_ascii=False).encode()
    with path.open("rb") as file:
        for number, line in enumerate(_whole_lines(file), 1):
            if wanted is None or wanted in line:
                step, by_question = _parsed(path, number, line)
                yield step, _events(path, number, by_question, question_id)
            else:
                yield _step_of(path, number, line), []


@dataclass(frozen=True)
class HistoryTable:
    """A history as columns, one entry an event, in the order of the file."""

    question_ids: list[str]
    """Every question once, in the order of first events."""
    steps: list[int]
    """Every step that the file has."""
    step: NDArray[np.int32]
    question: NDArray[np.int32]
    """Place in `question_ids`."""
    kind: NDArray[np.int8]
    """Place in `list(FIELDS)`."""
    count: NDArray[np.int32]
    of: NDArray[np.int32]
    answer: NDArray[np.int64]
    mean_ratio: NDArray[np.float32]
    max_ratio: NDArray[np.float32]
    reason: list[str]

    def of_kind(self, kind: str) -> NDArray[np.bool_]:
        """Which events are of this kind."""
        return self.kind == list(FIELDS).index(kind)


def read_history_table(path: Path) -> HistoryTable:
    """The whole history; raises DataError as `read_history` does."""
    places: dict[str, int] = {}
    kinds = {kind: place for place, kind in enumerate(FIELDS)}
    steps: list[int] = []
    rows: list[tuple[Any, ...]] = []
    for step, events in read_history(path):
        steps.append(step)
        for event in events:
            question = places.setdefault(event.question_id, len(places))
            rows.append((step, question, kinds[event.kind], *_REST(event)))
    columns = list(zip(*rows, strict=True)) or [()] * (len(_COLUMNS) + 1)
    arrays: dict[str, Any] = {
        name: np.array(column, dtype) for (name, dtype), column in zip(_COLUMNS.items(), columns[:-1], strict=True)
    }
    return HistoryTable(question_ids=list(places), steps=steps, reason=list(columns[-1]), **arrays)


_COLUMNS = {
    "step": np.int32, "question": np.int32, "kind": np.int8, "count": np.int32, "of": np.int32, "answer": np.int64,
    "mean_ratio": np.float32, "max_ratio": np.float32,
}  # fmt: skip
_CHECKSUM = b',"crc32":'
_REST = attrgetter(*list(_COLUMNS)[3:], "reason")


def _plain(value: Any) -> Any:
    """As JSON has it: floats to four digits, null where not finite."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def _cut(path: Path, keeps: Callable[[int, bytes], bool]) -> None:
    """Cut the file off behind its last whole line that is kept, before the first that is not."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(_whole_lines(file), 1):
            if not keeps(number, line):
                break
            end += len(line)
    if end < path.stat().st_size:
        os.truncate(path, end)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        if line.endswith(b"\n"):
            yield line


def _step_of(path: Path, number: int, line: bytes) -> int:
    """The number that follows `{"step":`, without parsing the rest."""
    try:
        return int(line[len(b'{"step":') : line.index(b",")])
    except ValueError as error:
        raise _fault(path, number, error) from error


def _parsed(path: Path, number: int, line: bytes) -> tuple[int, dict[str, Any]]:
    try:
        record = json.loads(line)
        checksum = record.pop("crc32", None)
        if checksum is not None and checksum != zlib.crc32(line[: line.rindex(_CHECKSUM)]):
            raise ValueError("its checksum does not hold")
        if record.keys() != {"step", "questions"}:
            raise KeyError(*(record.keys() ^ {"step", "questions"}))
        return int(record["step"]), dict(record["questions"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _fault(path, number, error) from error


def _events(path: Path, number: int, by_question: dict[str, Any], wanted: str | None) -> list[Event]:
    try:
        chosen = by_question if wanted is None else {wanted: by_question[wanted]} if wanted in by_question else {}
        return [_event(name, kind, values) for name, listed in chosen.items() for kind, *values in listed]
    except (KeyError, ValueError, TypeError) as error:
        raise _fault(path, number, error) from error


def _event(question_id: str, kind: str, values: list[Any]) -> Event:
    finite = (math.nan if value is None else value for value in values)
    fields: dict[str, Any] = dict(zip(FIELDS[kind], finite, strict=True))
    return Event(question_id, kind, **fields)


def _fault(path: Path, number: int, error: Exception) -> DataError:
    return DataError(f"{path}, line {number}: no step of a history ({error!r}); remove the line")
