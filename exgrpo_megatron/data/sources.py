"""The rows of a section of questions: those of its file, or those that a function of the user's gives."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from exgrpo_megatron.config import DataSourceConfig
from exgrpo_megatron.data.rows import Row, read_rows, row_of_mapping
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.rewards.function_worker import described, load_function


def source_rows(source: DataSourceConfig, columns: Sequence[str], key: str) -> Iterator[Row]:
    """Every row of `path` or `source_function`, with the values of `columns`; `key` is the dotted recipe key of the
    section.

    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
        DataError: at the first thing wrong with a row, or the first error of the function, with its number.
    """
    if source.path is not None:
        yield from read_rows(source.path, columns, f"{key}.path")
        return
    assert source.source_function is not None
    name, number = source.source_function, 0
    for number, values in enumerate(_given(name, f"{key}.source_function"), start=1):
        yield row_of_mapping(values, f"{name}, row {number}", columns)
    if number == 0:
        raise DataError(f"{key}.source_function = {name!r}: it gives no row; let it give questions")


def _given(name: str, key: str) -> Iterator[Mapping[str, Any]]:
    """What the function gives, one by one; its errors are told with the line that raised them."""
    try:
        function = load_function(name)
    except ImportError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    number = 0
    try:
        rows = function()
        if not isinstance(rows, Iterable) or isinstance(rows, str | Mapping):
            raise TypeError(f"gives {type(rows).__name__}, not rows: it must return a list of them, or yield them")
        for row in rows:
            number += 1
            yield row
    except (Exception, SystemExit) as error:
        raise DataError(f"{key} = {name!r}, row {number + 1}: {described(error)} ({_where(error)})") from error


def _where(error: BaseException) -> str:
    """The innermost place of the function's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
