"""Worked solutions, as a question file has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exgrpo_megatron.config import DataSourceConfig
from exgrpo_megatron.data.rows import Row
from exgrpo_megatron.data.sources import source_rows
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.rewards.rules import boxed_answer


@dataclass(frozen=True)
class Solution:
    """One row's question and worked solution, without what `solution_remove` matches."""

    question: str
    text: str


def solution_column(source: DataSourceConfig, key: str) -> str:
    """The column of the solutions; `key` is the dotted recipe key of the source.

    Raises:
        ConfigError: the source has no columns, or no solution column is named.
    """
    if not source.has_rows or source.solution_key is None:
        missing = "solution_key" if source.has_rows else "path"
        raise ConfigError(
            f"{key}.{missing} is null: worked solutions come from a file or function; set {key}.path (or "
            f"source_function) and {key}.solution_key (the column with the solution)"
        )
    return source.solution_key


def read_solutions(source: DataSourceConfig, key: str) -> Iterator[Solution]:
    """The solutions of a source, row by row.

    Raises:
        ConfigError: as `solution_column`.
        DataError: at the first row that cannot be used.
    """
    column = solution_column(source, key)
    for row in source_rows(source, [source.question_key, column], key):
        yield Solution(row.text(source.question_key), _text(row, column, source.solution_remove))


def closed_solutions(source: DataSourceConfig, solution: str, gold: str, endings: Sequence[str]) -> list[str]:
    """The responses that a solution makes: itself if it has a box, else once with each of `endings`, in which {answer}
    stands for the gold answer. Where one column has both, what stands before `answer_marker` is the solution."""
    marker = source.answer_marker if source.solution_key == source.answer_key else None
    working = (solution.rpartition(marker)[0] if marker else solution).strip()
    if boxed_answer(working) is not None:
        return [working]
    return [f"{working}\n{ending.replace('{answer}', gold)}".lstrip() for ending in endings]


def _text(row: Row, column: str, remove: str | None) -> str:
    whole = row.text(column)
    text = whole if remove is None else re.sub(remove, "", whole)
    if not text.strip():
        raise DataError(
            f'{row.place}: solution_remove {remove!r} leaves nothing of "{column}"; correct it in the recipe'
        )
    return text
