"""Rows of question files, JSONL or Parquet, read one by one; every row knows its place for the messages about it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.data.foreign_kinds import REQUIRED, SourceFormat
from exgrpo_megatron.errors import DataError

_JSONL_ENDINGS = (".jsonl", ".ndjson")
_PARQUET_ENDINGS = (".parquet",)
_PARQUET_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """One row of a question file."""

    place: str
    """File and line (JSONL) or row (Parquet), counted from 1."""
    values: Mapping[str, Any]

    def text(self, column: str) -> str:
        """The text in a column; DataError where it is empty or no text."""
        value = self.values[column]
        if not isinstance(value, str):
            raise self._error(column, f"must be text, found {_shown(value)}; {_remedy(value)}")
        return self._checked(column, value)

    def text_or_number(self, column: str) -> str:
        """A text or number as text, without surrounding spaces; DataError where it is empty or anything else."""
        value = self.values[column]
        text = value.strip() if isinstance(value, str) else number_text(value)
        if text is None:
            raise self._error(column, f"must be text or a number, found {_shown(value)}; {_remedy(value)}")
        return self._checked(column, text)

    def _checked(self, column: str, text: str) -> str:
        if not text.strip():
            raise self._error(column, "is empty; fill it in, or remove the row")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which is no character.
            raise self._error(column, f"has {text[error.start]!a}, which is no character; correct the row") from error
        return text

    def _error(self, column: str, found: str) -> DataError:
        return DataError(f'{self.place}: "{column}" {found}')


def read_rows(path: str | Path, columns: Sequence[str], key: str) -> Iterator[Row]:
    """Every row of a `.jsonl`, `.ndjson` or `.parquet` file, with the values of `columns`.

    `key` is the dotted recipe key of the path. Blank lines of JSONL are passed over.

    Raises:
        DataError: at the first thing wrong with the file, quoting its path and the line or row.
    """
    file = Path(path)
    ending = file.suffix.lower()
    if not file.exists():
        raise DataError(
            f"{key} = {file}: there is no such file; correct the path (relative paths start at {Path.cwd()})"
        )
    if file.is_dir():
        raise DataError(f"{key} = {file} is a folder; give the path of one .jsonl or .parquet file in it")
    if ending not in (*_JSONL_ENDINGS, *_PARQUET_ENDINGS):
        known = ", ".join((*_JSONL_ENDINGS, *_PARQUET_ENDINGS))
        raise DataError(f"{key} = {file}: the file ending {ending!r} is unknown; convert it to one of {known}")
    rows = _jsonl_rows(file, columns) if ending in _JSONL_ENDINGS else _parquet_rows(file, columns)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{key} = {file}: the file has no row; give a file with questions")


def _jsonl_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _jsonl_row(line, f"{file}, line {number}", columns)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; check the file and its permissions") from error


def _jsonl_row(line: bytes, place: str, columns: Sequence[str]) -> Row:
    try:
        # Some editors put a byte-order mark before the first line.
        values = json.loads(line.decode("utf-8-sig"), object_pairs_hook=partial(_unique_keys, place))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error.msg} at character {error.pos + 1}; correct the line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: JSON that cannot be read: {error}; correct the line") from error
    if not isinstance(values, dict):
        raise DataError(f"{place}: must be a JSON object with the columns {_list(columns)}, found {_shown(values)}")
    _check_columns(place, columns, list(values))
    return Row(place, values)


def row_of_mapping(values: Mapping[str, Any], place: str, columns: Sequence[str]) -> Row:
    """A row that is there already; DataError where it is no mapping with these columns."""
    if not isinstance(values, Mapping):
        raise DataError(f"{place}: must be a mapping with the columns {_list(columns)}, found {_shown(values)}")
    _check_columns(place, columns, [str(name) for name in values])
    return Row(place, dict(values))


def _unique_keys(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_unique(place, [name for name, _ in pairs])
    return dict(pairs)


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(file) as table:
            _check_unique(str(file), table.schema_arrow.names)
            _check_columns(str(file), columns, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=list(dict.fromkeys(columns))):
                for index in range(batch.num_rows):
                    number += 1
                    values = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
                    yield Row(f"{file}, row {number}", values)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, row {number}: text that is not UTF-8; correct the row") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}; check or rewrite the file") from error


def _check_unique(place: str, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{place}: {_list(twice)} stands there more than once; keep one of them")


def _check_columns(place: str, wanted: Sequence[str], present: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise DataError(
            f"{place}: no column {_list(missing)}; there are {_list(present)}: name the right ones in the recipe "
            f"(question_key, answer_key, id_key, category_key, solution_key, choices_key){_other_way(present)}"
        )


def _other_way(present: Sequence[str]) -> str:
    """For columns that `exgrpo data prepare` knows and a question file does not have."""
    kinds = (kind for kind in REQUIRED if kind is not SourceFormat.questions)
    kind = next((kind for kind in kinds if set(REQUIRED[kind]) <= set(present)), None)
    if kind is None:
        return ""
    return f"; of such a file ({kind}), `exgrpo data prepare FILE --out train.jsonl` makes one of questions"


def number_text(value: Any) -> str | None:
    """A number as people write it (12, not 12.0 or 1.2e1); None for anything else."""
    known = isinstance(value, int | float | Decimal | np.integer | np.floating) and not isinstance(value, bool)
    if not known or not math.isfinite(value):
        return None
    if value == int(value):
        return str(int(value))
    return f"{Decimal(str(value)).normalize():f}"


def _remedy(value: Any) -> str:
    """What to do about a value that is no text; verl's files have chats and objects with the answer in them."""
    first = value[0] if isinstance(value, list) and value else value
    of_verl = isinstance(first, Mapping) and ("role" in first or "ground_truth" in first)
    return "`exgrpo data prepare` makes a question file of such a one" if of_verl else "correct the row"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=False)
    kind = "nothing (null)" if value is None else type(value).__name__
    return kind if value is None else f"{kind} {text if len(text) <= 60 else text[:60] + '...'}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"
