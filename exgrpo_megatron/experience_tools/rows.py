"""Stored answers as rows of JSON lines or Parquet made by anybody: read, checked one by one, and written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.errors import DataError
from exgrpo_megatron.experience.files import GROUP_SIZE_KEY, Row
from exgrpo_megatron.experience.soundness import answer_fault
from exgrpo_megatron.types import StoredAnswer

JSONL_FILE = "answers.jsonl"
"""In an exported folder."""
LONGEST_ID = 2**16 - 1
"""Bytes of a question's id, which a record counts in 16 bits."""
LARGEST_GROUP = 10_000
"""Answers of a group: an index has a list for every number of correct ones."""
HIGHEST_LOGPROB = 1e-3
"""Log-probs are at most 0, but for rounding."""
_REQUIRED = ("question_id", "token_ids", "logprobs")
_NUMBERS = {"bucket": 1, "policy_version": 0, "step": 0, "group_size": None}
"""Whole numbers that may be absent or null, and what stands for them."""
USED = (*_REQUIRED, *_NUMBERS)
DERIVED = ("position", "answer_index", "question", "text")
"""What an export has besides: worked out anew, or for people."""
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class CheckedRow:
    """An answer that can be stored."""

    question_id: str
    bucket: int
    answer: StoredAnswer


@dataclass
class RowCheck:
    """The rules of a row; `group_size` is what the rows say themselves where it is None, and the same for all."""

    group_size: int | None
    vocab_size: int | None = None
    """Token ids must be below; None: not known."""
    unused: set[str] = field(default_factory=set)
    """Names of columns that mean nothing here."""
    _buckets: dict[str, int] = field(default_factory=dict)

    def checked(self, place: str, values: Mapping[str, Any]) -> CheckedRow:
        """Raises DataError with `place` and the rule where the row breaks one."""
        self.unused |= values.keys() - {*USED, *DERIVED}
        fault = self._names_fault(values) or self._numbers_fault(values)
        if fault:
            raise DataError(f"{place}: {fault}")
        name = values["question_id"]
        token_ids, logprobs = _array(values["token_ids"], np.int64), _array(values["logprobs"], np.float64)
        fault = self._bucket_fault(values) or self._answer_fault(token_ids, logprobs)
        if fault:
            raise DataError(f"{place}, question {name[:80]!r}: {fault}")
        assert token_ids is not None
        assert logprobs is not None
        self._buckets[name] = _number(values, "bucket")
        answer = StoredAnswer(
            token_ids.astype(np.int32),
            logprobs.astype(np.float32),
            _number(values, "policy_version"),
            _number(values, "step"),
        )
        return CheckedRow(name, self._buckets[name], answer)

    def _names_fault(self, values: Mapping[str, Any]) -> str | None:
        missing = [name for name in _REQUIRED if values.get(name) is None]
        if missing:
            return f"`{missing[0]}` is missing; a row has {', '.join(_REQUIRED)}"
        name = values["question_id"]
        if not isinstance(name, str) or not name:
            return f"`question_id` must be a text that is not empty, found {str(name)[:80]!r}"
        if not _is_unicode(name):
            return f"`question_id` {name[:40]!a} has half of a surrogate pair, which is no character"
        if len(name.encode()) > LONGEST_ID:
            return f"`question_id` {name[:40]!r}... has {len(name.encode())} bytes, more than {LONGEST_ID}"
        return None

    def _numbers_fault(self, values: Mapping[str, Any]) -> str | None:
        for name in _NUMBERS:
            value = values.get(name)
            if value is not None and (type(value) is not int or not 0 <= value < 2**31):
                return f"`{name}` must be a whole number from 0 on, found {_shown(value)}"
        return None

    def _bucket_fault(self, values: Mapping[str, Any]) -> str | None:
        given, bucket = values.get("group_size"), _number(values, "bucket")
        self.group_size = self.group_size or given
        if self.group_size is None:
            return "nothing says how many answers a group has: a column `group_size`, or --group-size"
        if given is not None and given != self.group_size:
            return f"`group_size` is {given}, but {self.group_size} for the rows before or by --group-size"
        if self.group_size > LARGEST_GROUP:
            return f"`group_size` {self.group_size} is above {LARGEST_GROUP}"
        if not 1 <= bucket < self.group_size:
            return f"`bucket` {bucket} is not in 1..{self.group_size - 1} (k correct of a group of {self.group_size})"
        known = self._buckets.get(values["question_id"], bucket)
        return None if known == bucket else f"`bucket` is {bucket}, but {known} in an earlier row of the question"

    def _answer_fault(self, token_ids: Any, logprobs: Any) -> str | None:
        if token_ids is None:
            return "`token_ids` must be a list of whole numbers"
        if logprobs is None:
            return "`logprobs` must be a list of numbers"
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite then, and named
            fault = answer_fault(token_ids, logprobs.astype(np.float32))
        if fault:
            return f"the answer cannot be replayed: {fault}"
        highest = int(token_ids.max())
        if highest >= (self.vocab_size or 2**31):
            return f"token id {highest} is not below {self.vocab_size or 2**31}, the tokens of the vocabulary"
        if logprobs.max() > HIGHEST_LOGPROB:
            first = int(np.argmax(logprobs > HIGHEST_LOGPROB))
            return f"log-prob {first} of {len(logprobs)} is {logprobs[first]:g}, above 0: natural logarithms are wanted"
        return None


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for a message, columns) of every row of a Parquet or JSON-lines file, some at a time.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object.
    """
    return _json_rows(path) if is_jsonl(path) else _parquet_rows(path)


def is_jsonl(path: Path) -> bool:
    """Whether it is such a file, or an exported folder with one."""
    return path.suffix in (".jsonl", ".json") if path.is_file() else (path / JSONL_FILE).is_file()


def json_line(row: Row, group_size: int, texts: Mapping[str, str | None]) -> str:
    """One line of an export. Seven decimals of a log-prob give the stored one back exactly."""
    content = {
        "question_id": row.question_id,
        **texts,
        "bucket": row.bucket,
        "group_size": group_size,
        "position": row.position,
        "answer_index": row.answer_index,
        "policy_version": row.answer.policy_version,
        "step": row.answer.step,
        "token_ids": row.answer.token_ids.tolist(),
        "logprobs": np.round(row.answer.logprobs.astype(np.float64), 7).tolist(),
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return _NUMBERS[name] or 0 if value is None else int(value)


def _array(values: Any, dtype: Any) -> Any:
    """As an array; None where the values are no list of such numbers."""
    if isinstance(values, np.ndarray):
        kinds = "iu" if dtype is np.int64 else "iuf"
        return values.astype(dtype) if values.ndim == 1 and values.dtype.kind in kinds else None
    allowed = (int,) if dtype is np.int64 else (int, float)
    if not isinstance(values, list) or not all(type(value) in allowed for value in values):
        return None
    try:
        return np.array(values, dtype)
    except OverflowError:
        return None


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = path / JSONL_FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", _json_object(f"{path}, line {number}", line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _json_object(place: str, line: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{place}: not a JSON object")
    return content


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            recorded = (file.schema_arrow.metadata or {}).get(GROUP_SIZE_KEY)
            group_size = {"group_size": int(recorded)} if recorded else {}
            number = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for row in _batch_rows(batch):
                    yield f"{path}, row {number}", {**group_size, **row}
                    number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error}); JSON lines end in .jsonl") from error


def _check_columns(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path}: two columns are called `{twice[0]}`; keep one of them")


def _batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The columns that are used, lists as arrays where they are whole; others by name alone."""
    used = [name for name in batch.schema.names if name in USED]
    others = dict.fromkeys(name for name in batch.schema.names if name not in USED)
    columns = [_cells(batch.column(name)) for name in used]
    for values in zip(*columns, strict=True):
        yield {**others, **dict(zip(used, values, strict=True))}


def _cells(column: Any) -> list[Any]:
    if pa.types.is_list(column.type) and not column.null_count and not column.values.null_count:
        values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
        return [values[start:end] for start, end in pairwise(offsets.tolist())]
    return column.to_pylist()
