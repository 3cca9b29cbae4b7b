"""Reading experience files: what every process needs of all of them, and the answers that one process keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.files import (
    FORMAT_KEY,
    REMEDY,
    ROWS_AT_ONCE,
    SCHEMA,
    Row,
    find_answers_files,
)
from exgrpo_megatron.experience.manifest import check_group_size, find_index_files
from exgrpo_megatron.experience.recovery import find_segments
from exgrpo_megatron.experience.soundness import answer_fault
from exgrpo_megatron.types import StoredAnswer

_INDEX_COLUMNS = ("question_id", "bucket", "position", "answer_index", "step")
_ANSWER_COLUMNS = ("question_id", "token_ids", "logprobs", "policy_version", "step")
_ALL_COLUMNS = (*_INDEX_COLUMNS, "token_ids", "logprobs", "policy_version")


@dataclass(slots=True)
class Listing:
    """A question of the files."""

    question_id: str
    bucket: int
    position: int
    """0, 1, ... in the list of its bucket."""
    num_answers: int
    path: Path
    row: int
    """Where its first row stands."""
    steps: list[int]
    """Of its answers, oldest first: when each was stored."""

    def fault(self, text: str) -> CheckpointError:
        return _row_fault(self.path, self.row, self.question_id, text)


def read_index(paths: Sequence[Path], group_size: int) -> list[Listing]:
    """Every question of the files, bucket by bucket and in the order of its list. The answers themselves are not read.

    Raises:
        CheckpointError: a file is missing, unreadable or of another group size, or a row breaks a rule (it is named).
    """
    listings = _Listings(group_size)
    for path in paths:
        with _opened(path) as file:
            _check_schema(path, file.schema_arrow, group_size)
            for first_row, batch in _batches(path, file, range(file.num_row_groups), _INDEX_COLUMNS):
                listings.add(path, first_row, batch)
    return listings.in_order()


def read_answers(
    paths: Sequence[Path], group_size: int, owns: Callable[[str], bool], take: Callable[[str, StoredAnswer], bool]
) -> None:
    """Give `take` the answers of the questions that `owns` accepts, those of a question together and oldest first; row
    groups without any are passed over. It answers False where it has the same token ids already.

    The files must have passed `read_index`.

    Raises:
        CheckpointError: a file cannot be read, or an answer cannot be replayed or stands there twice (it is named).
    """
    for path in paths:
        with _opened(path) as file:
            _check_schema(path, file.schema_arrow, group_size)
            groups = [group for group in range(file.num_row_groups) if any(map(owns, _question_ids(file, group)))]
            for first_row, batch in _batches(path, file, groups, _ANSWER_COLUMNS):
                for row, (question_id, answer) in enumerate(_answers(batch), start=first_row):
                    fault = _store(take, question_id, answer) if owns(question_id) else None
                    if fault is not None:
                        raise _row_fault(path, row, question_id, fault)


def iterate_rows(paths: Sequence[Path], group_size: int) -> Iterator[Row]:
    """Every row of the files, some in memory at a time; rules that take several rows are not checked.

    Raises:
        CheckpointError: a file is missing, unreadable or of another group size, or an answer cannot be replayed.
    """
    sizes = [0] * group_size
    for path in paths:
        with _opened(path) as file:
            _check_schema(path, file.schema_arrow, group_size)
            for first_row, batch in _batches(path, file, range(file.num_row_groups), _ALL_COLUMNS):
                answers = zip(
                    range(first_row, first_row + batch.num_rows), _places(batch), _answers(batch), strict=True
                )
                for row, place, (question_id, answer) in answers:
                    yield _row(path, row, place, question_id, answer, sizes)


def question_ids(paths: Sequence[Path], group_size: int) -> Iterator[str]:
    """Of every row; nothing else is read. Raises CheckpointError as above."""
    for path in paths:
        with _opened(path) as file:
            _check_schema(path, file.schema_arrow, group_size)
            for group in range(file.num_row_groups):
                yield from _question_ids(file, group)


def check_answers_files(path: Path, group_size: int) -> None:
    """Refuse early, without reading the rows, what reading would refuse for the files as a whole.

    Raises:
        CheckpointError: a file is missing, no experience file, or of another group size.
    """
    indices = find_index_files(path)
    if indices:
        for part in indices:
            with _opened(part) as file:
                check_group_size(part, file.schema_arrow, group_size)
        return
    if find_segments(path):
        return
    for part in find_answers_files(path):
        with _opened(part) as file:
            _check_schema(part, file.schema_arrow, group_size)


def _row(path: Path, row: int, place: _Place, question_id: str, answer: StoredAnswer, sizes: list[int]) -> Row:
    """`sizes`: of the buckets so far, for format 1, where the order of the rows says the position."""
    fault = answer_fault(answer.token_ids, answer.logprobs)
    if fault is not None:
        raise _row_fault(path, row, question_id, f"the answer cannot be replayed: {fault}")
    if not 1 <= place.bucket < len(sizes):
        raise _row_fault(path, row, question_id, f"bucket {place.bucket} is not in 1..{len(sizes) - 1}")
    sizes[place.bucket] += place.answer_index == 0
    position = sizes[place.bucket] - 1 if place.position is None else place.position
    return Row(question_id, place.bucket, position, place.answer_index, answer)


def _places(batch: Any) -> Iterator[_Place]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name in _INDEX_COLUMNS}
    columns.setdefault("position", [None] * batch.num_rows)
    return map(_Place, *(columns[name] for name in _INDEX_COLUMNS))


class _Place(NamedTuple):
    """The index columns of a row, in their order."""

    question_id: str
    bucket: int
    position: int | None
    """None in format 1, where the order of the rows says it."""
    answer_index: int
    step: int


class _Listings:
    """Questions in the order of their rows, and the rules of a row given those before it."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._listings: list[Listing] = []
        self._seen: set[str] = set()
        self._sizes = [0] * group_size

    def add(self, path: Path, first_row: int, batch: Any) -> None:
        for row, place in enumerate(_places(batch), start=first_row):
            fault = self._take(path, row, place)
            if fault is not None:
                raise _row_fault(path, row, place.question_id, fault)

    def in_order(self) -> list[Listing]:
        """Raises CheckpointError where the positions of a bucket are not 0, 1, ..."""
        listings = sorted(self._listings, key=lambda listing: (listing.bucket, listing.position))
        due = [0] * self._group_size
        for listing in listings:
            if listing.position != due[listing.bucket]:
                raise listing.fault(
                    f"position is {listing.position} where {due[listing.bucket]} is due in bucket {listing.bucket}"
                )
            due[listing.bucket] += 1
        return listings

    def _take(self, path: Path, row: int, place: _Place) -> str | None:
        """Which rule the row breaks, or None."""
        if not 1 <= place.bucket < self._group_size:
            return f"bucket {place.bucket} is not in 1..{self._group_size - 1}"
        last = self._listings[-1] if self._listings else None
        if last and (last.question_id, last.path) == (place.question_id, path):
            last.num_answers += 1
            last.steps.append(place.step)
            return _continuation_fault(last, place)
        if place.question_id in self._seen:
            return "the rows of the question do not stand together"
        if place.answer_index != 0:
            return f"answer_index is {place.answer_index} where 0 is due"
        position = self._sizes[place.bucket] if place.position is None else place.position
        self._sizes[place.bucket] += 1
        self._seen.add(place.question_id)
        self._listings.append(Listing(place.question_id, place.bucket, position, 1, path, row, [place.step]))
        return None


def _continuation_fault(question: Listing, place: _Place) -> str | None:
    due = question.num_answers - 1
    if place.answer_index != due:
        return f"answer_index is {place.answer_index} where {due} is due"
    if place.bucket != question.bucket:
        return f"bucket is {place.bucket} here and {question.bucket} in the row before"
    if place.position not in (None, question.position):
        return f"position is {place.position} here and {question.position} in the row before"
    return None


def _store(take: Callable[[str, StoredAnswer], bool], question_id: str, answer: StoredAnswer) -> str | None:
    fault = answer_fault(answer.token_ids, answer.logprobs)
    if fault is not None:
        return f"the answer cannot be replayed: {fault}"
    if not take(question_id, answer):
        return "the same token ids are stored for the question already"
    return None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such experience file.") from error
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {REMEDY}.") from error


def _batches(path: Path, file: Any, groups: Sequence[int], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """(number of the first row, rows) of the row groups, some at a time, without empty cells."""
    present = [name for name in columns if name in file.schema_arrow.names]
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    for group in groups:
        first_row = sum(sizes[:group])
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=present):
            _check_no_nulls(path, batch, first_row)
            yield first_row, batch
            first_row += batch.num_rows


def _question_ids(file: Any, group: int) -> list[str]:
    return file.read_row_group(group, columns=["question_id"]).column("question_id").to_pylist()


def _answers(batch: Any) -> Iterator[tuple[str, StoredAnswer]]:
    ids, versions, steps = (batch.column(name).to_pylist() for name in ("question_id", "policy_version", "step"))
    tokens, logprobs = (_arrays(batch.column(name)) for name in ("token_ids", "logprobs"))
    for i, question_id in enumerate(ids):
        yield question_id, StoredAnswer(tokens[i], logprobs[i], versions[i], steps[i])


def _arrays(column: Any) -> list[Any]:
    """The lists of a list column as views of its flat values."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def _check_schema(path: Path, schema: Any, group_size: int) -> None:
    metadata = schema.metadata or {}
    for field in SCHEMA:
        place = schema.get_field_index(field.name)
        if place < 0 and field.name == "position" and FORMAT_KEY not in metadata:
            continue
        if place < 0 or schema.field(place).type != field.type:
            found = "missing" if place < 0 else f"of type {schema.field(place).type}"
            raise CheckpointError(
                f"{path}: column `{field.name}` is {found}; an experience file has it as {field.type}. {REMEDY}."
            )
    check_group_size(path, schema, group_size)


def _check_no_nulls(path: Path, batch: Any, first_row: int) -> None:
    for name in batch.schema.names:
        column = batch.column(name)
        if column.null_count:
            row = first_row + column.is_null().to_pylist().index(True)
            raise CheckpointError(f"{path}: row {row}: `{name}` is empty. {REMEDY}.")
        if pa.types.is_list(column.type) and column.values.null_count:
            row = first_row + next(i for i, values in enumerate(column.to_pylist()) if None in values)
            raise CheckpointError(f"{path}: row {row}: `{name}` has an empty element. {REMEDY}.")


def _row_fault(path: Path, row: int, question_id: str, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: row {row}, question {question_id!r}: {text}. {REMEDY}.")
