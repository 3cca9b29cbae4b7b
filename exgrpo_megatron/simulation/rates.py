"""Where the pass rates of a simulation come from: a named distribution, a file of pass rates, or a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from exgrpo_megatron.data.rows import Row, read_rows
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.experience.history import HISTORY_FILE, read_history
from exgrpo_megatron.report.run_data import RunData, load_run
from exgrpo_megatron.simulation.learner import FloatArray

DISTRIBUTIONS = "uniform, constant:P, beta:A,B"
MEASURED_ENDING = ".pass_rates.jsonl"
"""Of the file that `exgrpo eval` writes."""
_FIRST_STEPS = 5
"""Steps of a run whose counts say how its pass rates were spread."""
_USUAL_CORRELATION, _LEAST_CORRELATION = 0.33, 1e-3
"""Of two answers to one question: where nothing says it, and at least (and at most 1 - this)."""
_MOST_DISTINCT = 1000
_MOST_ANSWERS = 100_000
"""To one question, in a file of counts."""


@dataclass(frozen=True)
class Rates:
    """True pass rates to begin with."""

    values: FloatArray
    """Shape [questions]."""
    words: str
    """Where they come from."""
    curve: Mapping[int, float] | None = None
    """Step -> logged pass rate of the new answers."""
    answer_bytes: float | None = None
    """Of a stored answer, where a run says it."""
    distinct: int | None = None
    """Different right answers of a question, where a run says it."""

    def resized(self, questions: int, rng: np.random.Generator) -> Rates:
        """For another number of questions: drawn from these, with replacement."""
        if questions == len(self.values):
            return self
        words = f"{self.words}; {questions} questions drawn from {len(self.values)}"
        return replace(self, values=rng.choice(self.values, size=questions), words=words)


def is_distribution(source: str) -> bool:
    """Whether it names a distribution, and so does not say how many questions there are."""
    return source.partition(":")[0] in _DRAWS


def find_rates(source: str, questions: int, rng: np.random.Generator) -> Rates:
    """Pass rates of a distribution by name (for so many questions), or of a file or a run's folder (for as many as it
    has).

    Raises:
        ConfigError: neither.
        DataError: a file without pass rates, or a pass rate that is none.
    """
    name, _, numbers = source.partition(":")
    draw = _DRAWS.get(name)
    if draw is not None:
        return Rates(draw(_numbers(source, numbers), questions, rng), source)
    path = Path(source)
    if path.is_dir():
        return _rates_of_run(load_run(path), path / HISTORY_FILE, rng)
    if path.is_file():
        return _rates_of_file(path, rng)
    raise ConfigError(
        f"--rates {source!r} is neither a distribution ({DISTRIBUTIONS}) nor a file of pass rates nor a run's folder"
    )


def fit_beta(right: FloatArray, questions: FloatArray) -> tuple[float, float]:
    """a and b of the beta distribution behind counts of right answers, by their mean and variance.

    `questions` has shape [K + 1]: so many questions had `right` (0..K) of K answers right. Counts that vary less than
    one pass rate for all would make them give a narrow distribution, and those of a single answer say nothing of it.
    """
    size = float(right.max())
    mean = float(np.average(right, weights=questions))
    variance = float(np.average((right - mean) ** 2, weights=questions))
    share = min(max(mean / size, 1e-4), 1 - 1e-4)
    alone = size * share * (1 - share)
    # Var k = K m (1 - m) (1 + (K - 1) r) with r = 1 / (a + b + 1).
    correlation = (variance / alone - 1) / (size - 1) if size > 1 else _USUAL_CORRELATION
    weight = 1 / min(max(correlation, _LEAST_CORRELATION), 1 - _LEAST_CORRELATION) - 1
    return weight * share, weight * (1 - share)


def fit_distinct(right: FloatArray, questions: FloatArray, stored: float) -> int | None:
    """How many equally likely right answers a question has, where of so many right ones `stored` were different; None:
    no two were alike."""
    if stored >= float(right @ questions):
        return None
    expected = [(n, float((n * (1 - (1 - 1 / n) ** right)) @ questions)) for n in range(1, _MOST_DISTINCT)]
    return min(expected, key=lambda pair: abs(pair[1] - stored))[0]


def _rates_of_run(run: RunData, history: Path, rng: np.random.Generator) -> Rates:
    """Spread as the first counts of the run were, and led along the pass rates of its new answers."""
    records = [record for record in run.records if "reward/pass_rate_fresh" in record]
    if not records:
        raise DataError(f"{run.name}: this run has no training step yet, so there are no pass rates to simulate with")
    size = run.config.grpo.num_generations_per_prompt
    right = np.arange(size + 1, dtype=np.float64)
    known = run.config.experience.enabled and "experience/bucket_1" in records[0]
    if history.is_file():
        counts = _counts_of_history(history, size)
    elif known:
        counts = _counts_of_buckets(run, records[:_FIRST_STEPS])
    else:
        raise DataError(f"{run.name}: this run has neither buckets nor {HISTORY_FILE} to say how pass rates vary")
    a, b = fit_beta(right, counts)
    stored = records[0].get("experience/stored_this_step", 0.0)
    return Rates(
        _beta([a, b], round(records[0]["data/questions_left"] + _retired_from_order(run, records[0])), rng),
        f"run {run.name}: beta:{a:.3g},{b:.3g}, then its logged pass rates",
        {int(record["step"]): record["reward/pass_rate_fresh"] for record in records},
        _bytes_of(run),
        fit_distinct(right[1:size], _buckets(records[0], size), stored) if known and stored else None,
    )


def _counts_of_history(path: Path, size: int) -> FloatArray:
    """How many questions had 0..K right in their first group, of those met in the first steps."""
    first: dict[str, int] = {}
    for _, events in islice(read_history(path), _FIRST_STEPS):
        for event in events:
            if event.kind == "tried":
                first.setdefault(event.question_id, event.count)
    return np.bincount(list(first.values()), minlength=size + 1).astype(np.float64)


def _counts_of_buckets(run: RunData, records: list[dict[str, float]]) -> FloatArray:
    """The same from metrics, by their latest group with a right answer."""
    last = records[-1]
    met = sum(run.config.grpo.num_prompts_per_step - record["experience/replayed_questions"] for record in records)
    stored, retired = _buckets(last, run.config.grpo.num_generations_per_prompt), last["experience/retired"]
    none = max(0.0, met - float(stored.sum()) - retired)
    return np.array([none, *stored, retired], dtype=np.float64)


def _buckets(record: dict[str, float], size: int) -> FloatArray:
    return np.array([record[f"experience/bucket_{k}"] for k in range(1, size)], dtype=np.float64)


def _retired_from_order(run: RunData, record: dict[str, float]) -> float:
    if run.config.experience.retire_from != "replay_and_fresh":
        return 0.0
    return record.get("experience/retired", 0.0) - record.get("data/retired_kept", 0.0)


def _bytes_of(run: RunData) -> float | None:
    answers, size = run.series("experience/stored_answers"), run.series("experience/stored_bytes")
    return float(size.values[-1] / answers.values[-1]) if len(size) and answers.values[-1] else None


def _rates_of_file(path: Path, rng: np.random.Generator) -> Rates:
    """Pass rates as they stand there; those that `exgrpo eval` measured, by so many answers a question, as counts."""
    if path.name.endswith(MEASURED_ENDING):
        return _rates_of_counts(path, rng)
    return Rates(np.array([_rate(row) for row in read_rows(str(path), ["pass_rate"], "--rates")]), path.name)


def _rates_of_counts(path: Path, rng: np.random.Generator) -> Rates:
    """True rates behind few answers: drawn from what a beta distribution, fitted to all counts, leaves possible for a
    question."""
    columns = ["num_correct", "num_answers"]
    rows = [_counted(row) for row in read_rows(str(path), columns, "--rates")]
    right, total = np.array(rows, dtype=np.float64).T
    size = int(total.max())
    counts = np.bincount(right[total == size].astype(int), minlength=size + 1)
    a, b = fit_beta(np.arange(size + 1, dtype=np.float64), counts.astype(np.float64))
    return Rates(rng.beta(a + right, b + total - right), f"{path.name} ({size} answers a question)")


def _counted(row: Row) -> tuple[int, int]:
    right, total = row.values["num_correct"], row.values["num_answers"]
    if type(right) is not int or type(total) is not int or not 0 <= right <= total or not 1 <= total <= _MOST_ANSWERS:
        raise DataError(
            f'{row.place}: "num_correct" and "num_answers" must be whole numbers, 0 <= num_correct <= num_answers and '
            f"1 <= num_answers <= {_MOST_ANSWERS}, found {str(right)[:40]} and {str(total)[:40]}; correct the row"
        )
    return right, total


def _rate(row: Row) -> float:
    value = row.values["pass_rate"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(f'{row.place}: "pass_rate" must be a number from 0 to 1, found {value!r}; correct the row')
    return float(value)


def _uniform(numbers: list[float], questions: int, rng: np.random.Generator) -> FloatArray:
    _check_count("uniform", numbers, 0)
    return rng.random(questions)


def _constant(numbers: list[float], questions: int, rng: np.random.Generator) -> FloatArray:
    del rng
    _check_count("constant", numbers, 1)
    if not 0 <= numbers[0] <= 1:
        raise ConfigError(f"--rates constant:{numbers[0]:g}: a pass rate is from 0 to 1")
    return np.full(questions, numbers[0])


def _beta(numbers: list[float], questions: int, rng: np.random.Generator) -> FloatArray:
    _check_count("beta", numbers, 2)
    if not all(0 < number < np.inf for number in numbers):
        raise ConfigError(f"--rates beta:{numbers[0]:g},{numbers[1]:g}: both must be above 0 and finite")
    return rng.beta(numbers[0], numbers[1], size=questions)


_DRAWS: dict[str, Callable[[list[float], int, np.random.Generator], FloatArray]] = {
    "uniform": _uniform,
    "constant": _constant,
    "beta": _beta,
}


def _numbers(source: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--rates {source!r}: {text!r} are not numbers ({DISTRIBUTIONS})") from None


def _check_count(name: str, numbers: list[float], wanted: int) -> None:
    if len(numbers) != wanted:
        raise ConfigError(f"--rates {name} takes {wanted} numbers, found {len(numbers)} ({DISTRIBUTIONS})")
