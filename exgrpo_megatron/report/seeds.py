"""Runs that differ in their seed alone, as one number with its interval, one curve with its band, one table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Seed = TypeVar("Seed", bound=Hashable)

ANSWERS_METRIC = "rollout/answers"
"""Answers sampled in a step: the budget at which runs are compared."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half width of its t-interval."""

    mean: float
    half_width: float
    """NaN where one seed alone says nothing of the spread."""
    num_seeds: int

    def describe(self, digits: int = 3) -> str:
        """`0.806 ± 0.109`; the mean alone where there is no spread to speak of."""
        mean = f"{self.mean:.{digits}f}"
        return mean if math.isnan(self.half_width) else f"{mean} ± {self.half_width:.{digits}f}"


@dataclass(frozen=True)
class Curve:
    """One metric of one run over what it had cost by then; both of shape [points]."""

    budget: FloatArray
    """Answers generated (or seconds, tokens) up to each point, increasing."""
    values: FloatArray
    """All finite."""

    def __post_init__(self) -> None:
        if len(self.budget) != len(self.values):
            raise ValueError(f"a curve of {len(self.values)} values at {len(self.budget)} budgets")
        if not np.isfinite(self.values).all() or not (np.diff(self.budget) > 0).all():
            raise ValueError("a curve needs finite values at increasing budgets")

    def at(self, budget: float) -> float:
        """The value at a budget, on the straight line between the points beside it; NaN before the first point and
        after the last: nothing is known there."""
        return float(np.interp(budget, self.budget, self.values, left=np.nan, right=np.nan)) if len(self) else math.nan

    def mean_until(self, budget: float) -> float:
        """The mean height from the first point to `budget` (the area below, divided by its width); NaN where the curve
        ends before."""
        end = self.at(budget)
        if math.isnan(end):
            return math.nan
        inside = self.budget < budget
        x, y = np.append(self.budget[inside], budget), np.append(self.values[inside], end)
        return end if len(x) == 1 else float(np.trapezoid(y, x) / (x[-1] - x[0]))

    def first_at_least(self, level: float) -> float | None:
        """The budget at which the lines between the points first reach `level`; None where they never do."""
        reached = np.flatnonzero(self.values >= level)
        if not len(reached):
            return None
        after = int(reached[0])
        if after == 0:
            return float(self.budget[0])
        (x0, x1), (y0, y1) = self.budget[after - 1 : after + 1], self.values[after - 1 : after + 1]
        return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))

    def __len__(self) -> int:
        return len(self.budget)


@dataclass(frozen=True)
class Band:
    """The mean of several curves and the t-interval around it, all of shape [points]."""

    budget: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean over seeds with the half width of its two-sided t-interval: t(n - 1) * s / sqrt(n).

    Raises:
        ValueError: no values, or one that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"an interval needs finite values, found {list(values)}")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, math.nan, 1)
    half = t_quantile(level, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, half, len(values))


def paired_difference(one: Mapping[Seed, float], other: Mapping[Seed, float], level: float = 0.95) -> Interval | None:
    """`one - other` of the seeds that both have, which takes out what a seed does to both; None for no such seed."""
    shared = [seed for seed in one if seed in other]
    return mean_interval([one[seed] - other[seed] for seed in shared], level) if shared else None


def t_quantile(level: float, degrees: int) -> float:
    """t such that Student's t with so many degrees of freedom lies within +-t with probability `level`.

    The probability has a finite closed form in theta = atan(t / sqrt(degrees)) (Abramowitz and Stegun, 26.7.3 and
    26.7.4), which grows with theta and is solved by halving.
    """
    if not (0 < level < 1 and degrees >= 1):
        raise ValueError(f"level must be between 0 and 1 and degrees at least 1, found {level} and {degrees}")
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if _probability_within(theta, degrees) < level else (low, theta)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def run_curve(records: Sequence[Mapping[str, float]], metric: str) -> Curve:
    """A metric of a run over the answers generated up to and with the step after which it was measured.

    `records` are those of `metrics.read_metrics`. Values that are not finite are left out, as are those of steps in
    which nothing was generated after another value: the later one stands.
    """
    answers, points = 0.0, dict[float, float]()
    for record in records:
        answers += record.get(ANSWERS_METRIC, 0.0)
        value = record.get(metric, math.nan)
        if math.isfinite(value):
            points[answers] = value
    return Curve(np.array(list(points), dtype=np.float64), np.array(list(points.values()), dtype=np.float64))


def band(curves: Sequence[Curve], num_points: int = 201, level: float = 0.95) -> Band | None:
    """Mean and interval of the curves where all of them are known; None where that is nowhere."""
    if not curves or not all(map(len, curves)):
        return None
    begin, end = max(curve.budget[0] for curve in curves), min(curve.budget[-1] for curve in curves)
    if begin > end:
        return None
    budget = np.linspace(begin, end, num_points)
    heights = np.array([np.interp(budget, curve.budget, curve.values) for curve in curves])
    mean = heights.mean(axis=0)
    half = np.zeros_like(mean)
    if len(curves) > 1:
        half = t_quantile(level, len(curves) - 1) * heights.std(axis=0, ddof=1) / math.sqrt(len(curves))
    return Band(budget, mean, mean - half, mean + half)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; `|` in a cell does not end it."""
    lines = [list(columns), ["---"] * len(columns), *map(list, rows)]
    assert all(len(line) == len(columns) for line in lines), "a row of another length than the header"
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _probability_within(theta: float, degrees: int) -> float:
    """Of Student's t to lie within +-sqrt(degrees) * tan(theta)."""
    odd = degrees % 2
    sine, square = math.sin(theta), math.cos(theta) ** 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
