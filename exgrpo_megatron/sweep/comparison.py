"""What the runs of a sweep show: each metric at the same number of answers, as a mean over seeds with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.metrics import find_metric
from exgrpo_megatron.report.seeds import Curve, Interval, mean_interval, paired_difference

Curves = Mapping[str, Mapping[str, Mapping[int, Curve]]]
"""Metric -> arm -> seed -> its curve over the answers generated."""


@dataclass(frozen=True)
class Level:
    """A value of a metric, and the question how many answers it takes to reach it."""

    metric: str
    value: float


@dataclass(frozen=True)
class Cell:
    """One arm at one number of answers, or on its way to a level."""

    by_seed: dict[int, float]
    """Of the seeds of which it is known."""
    num_runs: int
    """Finished runs of the arm."""
    interval: Interval | None
    """None where the value of a finished run is not known, so that a mean would be one of the others alone."""
    difference: Interval | None = None
    """To the arm that is compared with, over the seeds that both have; None where there is none."""


@dataclass(frozen=True)
class Column:
    """One number of all arms."""

    metric: str
    answers: float | None
    """Where the metric is read; None: the column is the answers to `level`."""
    level: float | None
    cells: dict[str, Cell]
    """By arm, each there is."""


def parse_level(text: str) -> Level:
    """`METRIC=VALUE`; raises ConfigError."""
    name, _, value = text.rpartition("=")
    try:
        return Level(known_metric(name, f"--reach {text!r}"), float(value))
    except ValueError:
        raise ConfigError(f"--reach {text!r}: write it as METRIC=VALUE, as in validation/pass_rate_t1=0.5") from None


def known_metric(name: str, where: str) -> str:
    """`name`, where a run writes such a metric; raises ConfigError."""
    if find_metric(name) is None:
        raise ConfigError(f"{where}: no run writes a metric {name!r}; docs/metrics.md lists them")
    return name


def columns_of(
    shown: Curves, curves: Curves, arms: Sequence[str], at: Sequence[float], levels: Sequence[Level], baseline: str
) -> list[Column]:
    """Of each metric in `shown` its value at each number of answers in `at`, and then the answers to each level, whose
    metrics are in `curves`.

    Without `at`, it is the most answers that every finished run had generated when the metric was last measured.
    `baseline`: the arm the others are compared with, seed by seed.
    """
    columns = []
    for metric, by_arm in shown.items():
        for answers in at or _common_budget(by_arm):
            values = {arm: _known({seed: c.at(answers) for seed, c in by_arm[arm].items()}) for arm in arms}
            columns.append(Column(metric, answers, None, _cells(values, by_arm, baseline)))
    for level in levels:
        by_arm = curves[level.metric]
        reached = {arm: {seed: c.first_at_least(level.value) for seed, c in by_arm[arm].items()} for arm in arms}
        values = {arm: {s: x for s, x in found.items() if x is not None} for arm, found in reached.items()}
        columns.append(Column(level.metric, None, level.value, _cells(values, by_arm, baseline)))
    return columns


def _common_budget(by_arm: Mapping[str, Mapping[int, Curve]]) -> list[float]:
    ends = [float(curve.budget[-1]) for curves in by_arm.values() for curve in curves.values() if len(curve)]
    return [min(ends)] if ends else []


def _known(values: dict[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if not math.isnan(value)}


def _cells(
    values: Mapping[str, dict[int, float]], by_arm: Mapping[str, Mapping[int, Curve]], baseline: str
) -> dict[str, Cell]:
    whole = {arm: bool(found) and len(found) == len(by_arm[arm]) for arm, found in values.items()}
    return {
        arm: Cell(
            by_seed=found,
            num_runs=len(by_arm[arm]),
            interval=mean_interval(list(found.values())) if whole[arm] else None,
            difference=paired_difference(found, values[baseline])
            if arm != baseline and whole[arm] and whole[baseline]
            else None,
        )
        for arm, found in values.items()
    }
