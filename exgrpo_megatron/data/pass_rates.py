"""Measured pass rates of questions (`exgrpo eval` writes them), and the bands that a recipe can train on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from exgrpo_megatron.config import PassRateBand
from exgrpo_megatron.data.rows import read_rows
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.files import replace_text


@dataclass(frozen=True)
class Band:
    """The pass rates between two bounds."""

    low: float
    high: float
    with_low: bool = True
    with_high: bool = True

    def __contains__(self, pass_rate: float) -> bool:
        above = pass_rate >= self.low if self.with_low else pass_rate > self.low
        below = pass_rate <= self.high if self.with_high else pass_rate < self.high
        return above and below

    def describe(self) -> str:
        """Such as `(25%, 75%]`."""
        return f"{'[' if self.with_low else '('}{self.low:.0%}, {self.high:.0%}{']' if self.with_high else ')'}"


BANDS: dict[PassRateBand, Band] = {
    "easy": Band(0.75, 1.0, with_high=False),
    "medium": Band(0.25, 0.75, with_low=False),
    "hard": Band(0.0, 0.25, with_low=False),
}
"""Those of the paper's study (arXiv:2510.02245). Always and never solved questions are in none; 75 % is in two."""


@dataclass(frozen=True)
class PassRate:
    """What was measured of one question."""

    question_id: str
    num_correct: int
    num_answers: int
    category: str | None = None

    @property
    def value(self) -> float:
        return self.num_correct / self.num_answers


def measured(answers: Iterable[Mapping[str, object]]) -> list[PassRate]:
    """Pass rates of graded answers (`question_id`, `category`, `status`), in the order of their questions."""
    rights: dict[str, list[bool]] = {}
    categories: dict[str, str | None] = {}
    for row in answers:
        name, category = str(row["question_id"]), row["category"]
        rights.setdefault(name, []).append(row["status"] == "correct")
        categories[name] = None if category is None else str(category)
    return [PassRate(name, sum(right), len(right), categories[name]) for name, right in rights.items()]


def write_pass_rates(path: Path, rates: Iterable[PassRate]) -> None:
    """One JSON line a question: `question_id`, `pass_rate`, `num_correct`, `num_answers`, `category`."""
    rows = [
        {
            "question_id": rate.question_id,
            "pass_rate": rate.value,
            "num_correct": rate.num_correct,
            "num_answers": rate.num_answers,
            "category": rate.category,
        }
        for rate in rates
    ]
    replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_pass_rates(path: str, key: str) -> dict[str, float]:
    """Question id -> pass rate, of a JSONL or Parquet file with columns `question_id` and `pass_rate`; `key` is the
    recipe's for `path`, for the messages.

    Raises:
        DataError: there is no such file, or at the first row without a rate from 0 to 1 or of a question seen before.
    """
    rates: dict[str, float] = {}
    for row in read_rows(path, ["question_id", "pass_rate"], key):
        name, text = row.text_or_number("question_id"), row.text_or_number("pass_rate")
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 <= rate <= 1:
            raise DataError(f'{row.place}: "pass_rate" must be a number from 0 to 1, found {text!r}; correct the row')
        if name in rates:
            raise DataError(f"{row.place}: question {name!r} has a pass rate already; remove one of the rows")
        rates[name] = rate
    return rates
