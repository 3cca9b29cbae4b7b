"""Experience on disk: one Parquet row a stored answer, and a small JSON beside it with the retired questions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.answers import answer_fault
from exgrpo_megatron.types import StoredAnswer

ANSWERS_FILE = "experience.parquet"
SUMMARY_FILE = "experience.json"
FORMAT = 1

_GROUP_SIZE_KEY = b"exgrpo.group_size"
_ROWS_AT_ONCE = 4096
_REMEDY = "The file is damaged or was changed by hand: use another checkpoint, or an unchanged copy"
_SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("answer_index", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Row:
    """One stored answer as it stands in the file."""

    question_id: str
    bucket: int
    """k of K when the question was last tried; the same in every row of a question."""
    answer_index: int
    """0, 1, ... among the answers of the question, whose rows stand together."""
    answer: StoredAnswer


@dataclass(frozen=True)
class Summary:
    """What the Parquet file does not hold, and what it must agree with."""

    group_size: int
    num_questions: int
    num_answers: int
    retired: tuple[str, ...]


def write_answers(path: Path, rows: Iterable[Row], group_size: int) -> None:
    """Write rows a few thousand at a time, with page checksums. The order of the rows is kept."""
    schema = _SCHEMA.with_metadata({_GROUP_SIZE_KEY: str(group_size).encode()})
    remaining = iter(rows)
    options = {"compression": "zstd", "use_dictionary": ["question_id"], "write_page_checksum": True}
    with pq.ParquetWriter(path, schema, **options) as writer:
        while batch := list(islice(remaining, _ROWS_AT_ONCE)):
            writer.write_batch(_record_batch(batch, schema))


def read_answers(path: Path, group_size: int) -> list[Row]:
    """All rows, checked one by one.

    Raises:
        CheckpointError: the file is missing, unreadable, of another group size, or a row breaks a rule (it is named).
    """
    rows: list[Row] = []
    check = _RowCheck(group_size)
    for number, row in enumerate(_rows(path, group_size)):
        fault = check.fault(row)
        if fault is not None:
            raise CheckpointError(f"{path}: row {number}, question {row.question_id!r}: {fault}. {_REMEDY}.")
        rows.append(row)
    return rows


def check_answers_file(path: Path, group_size: int) -> None:
    """Refuse early, without reading the rows, what `read_answers` would refuse for the file as a whole.

    Raises:
        CheckpointError: the file is missing, no experience file, or of another group size.
    """
    path = path / ANSWERS_FILE if path.is_dir() else path
    with _opened(path) as file:
        _check_schema(path, file.schema_arrow, group_size)


def write_summary(path: Path, summary: Summary) -> None:
    content = {
        "format": FORMAT,
        "group_size": summary.group_size,
        "num_questions": summary.num_questions,
        "num_answers": summary.num_answers,
        "retired": list(summary.retired),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """Raises CheckpointError where the file is missing, not JSON, of another format, or has a wrong field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found. It stands beside {ANSWERS_FILE} in every checkpoint.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {_REMEDY}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: this is not an experience summary of format {FORMAT}. {_REMEDY}.")
    retired = content.get("retired")
    if not isinstance(retired, list) or not all(isinstance(name, str) for name in retired):
        raise CheckpointError(f"{path}: `retired` must be a list of question ids. {_REMEDY}.")
    return Summary(
        group_size=_whole_number(path, content, "group_size"),
        num_questions=_whole_number(path, content, "num_questions"),
        num_answers=_whole_number(path, content, "num_answers"),
        retired=tuple(retired),
    )


def _whole_number(path: Path, content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: `{name}` must be a whole number, found {value!r}. {_REMEDY}.")
    return value


def _record_batch(rows: Sequence[Row], schema: Any) -> Any:
    answers = [row.answer for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(answer.token_ids) for answer in answers], out=offsets[1:])
    columns = [
        pa.array([row.question_id for row in rows], pa.string()),
        pa.array([row.bucket for row in rows], pa.int32()),
        pa.array([row.answer_index for row in rows], pa.int32()),
        pa.ListArray.from_arrays(offsets, np.concatenate([answer.token_ids for answer in answers])),
        pa.ListArray.from_arrays(offsets, np.concatenate([answer.logprobs for answer in answers])),
        pa.array([answer.policy_version for answer in answers], pa.int64()),
        pa.array([answer.step for answer in answers], pa.int64()),
    ]
    return pa.record_batch(columns, schema=schema)


def _rows(path: Path, group_size: int) -> Iterator[Row]:
    with _opened(path) as file:
        _check_schema(path, file.schema_arrow, group_size)
        first = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE):
            _check_no_nulls(path, batch, first)
            yield from _batch_rows(batch)
            first += batch.num_rows


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such experience file.") from error
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {_REMEDY}.") from error


def _batch_rows(batch: Any) -> Iterator[Row]:
    ids, buckets, indices, versions, steps = (
        batch.column(name).to_pylist() for name in ("question_id", "bucket", "answer_index", "policy_version", "step")
    )
    tokens, logprobs = (_arrays(batch.column(name)) for name in ("token_ids", "logprobs"))
    for i, question_id in enumerate(ids):
        yield Row(question_id, buckets[i], indices[i], StoredAnswer(tokens[i], logprobs[i], versions[i], steps[i]))


def _arrays(column: Any) -> list[Any]:
    """The lists of a list column as views of its flat values."""
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets.tolist())]


def _check_schema(path: Path, schema: Any, group_size: int) -> None:
    for field in _SCHEMA:
        position = schema.get_field_index(field.name)
        if position < 0 or schema.field(position).type != field.type:
            found = "missing" if position < 0 else f"of type {schema.field(position).type}"
            raise CheckpointError(
                f"{path}: column `{field.name}` is {found}; an experience file has it as {field.type}. {_REMEDY}."
            )
    recorded = (schema.metadata or {}).get(_GROUP_SIZE_KEY)
    if recorded != str(group_size).encode():
        found = "no group size" if recorded is None else f"groups of {recorded.decode(errors='replace')}"
        raise CheckpointError(
            f"{path}: written for {found}, but grpo.num_generations_per_prompt = {group_size} (a bucket is a number "
            "correct out of a group). Use experience of a run with the same group size, or set the key to it."
        )


def _check_no_nulls(path: Path, batch: Any, first_row: int) -> None:
    for name in _SCHEMA.names:
        column = batch.column(name)
        if column.null_count:
            row = first_row + column.is_null().to_pylist().index(True)
            raise CheckpointError(f"{path}: row {row}: `{name}` is empty. {_REMEDY}.")
        if pa.types.is_list(column.type) and column.values.null_count:
            row = first_row + next(i for i, values in enumerate(column.to_pylist()) if None in values)
            raise CheckpointError(f"{path}: row {row}: `{name}` has an empty element. {_REMEDY}.")


class _RowCheck:
    """The rules of a row, given the rows before it."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._seen: set[str] = set()
        self._previous: Row | None = None
        self._answers: set[bytes] = set()

    def fault(self, row: Row) -> str | None:
        """Which rule the row breaks, or None. Rows must be given in order."""
        continues = self._previous is not None and self._previous.question_id == row.question_id
        if not continues:
            self._answers = set()
        fault = self._place_fault(row, continues) or self._answer_fault(row.answer)
        self._seen.add(row.question_id)
        self._previous = row
        return fault

    def _place_fault(self, row: Row, continues: bool) -> str | None:
        if not 1 <= row.bucket < self._group_size:
            return f"bucket {row.bucket} is not in 1..{self._group_size - 1}"
        if not continues and row.question_id in self._seen:
            return "the rows of the question do not stand together"
        if row.answer_index != len(self._answers):
            return f"answer_index is {row.answer_index} where {len(self._answers)} is due"
        if continues and self._previous and self._previous.bucket != row.bucket:
            return f"bucket is {row.bucket} here and {self._previous.bucket} in the row before"
        return None

    def _answer_fault(self, answer: StoredAnswer) -> str | None:
        fault = answer_fault(answer.token_ids, answer.logprobs)
        if fault is not None:
            return f"the answer cannot be replayed: {fault}"
        token_bytes = answer.token_ids.tobytes()
        if token_bytes in self._answers:
            return "the same token ids are stored for the question already"
        self._answers.add(token_bytes)
        return None
