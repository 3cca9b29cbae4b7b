"""How hard questions are, by what became of the last attempts at each."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from exgrpo_megatron.experience.difficulty import bucket_of
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.question_stats import MAX_WINDOW, QuestionStats, StatsKept
from exgrpo_megatron.types import Group, Question, Trajectory

Metric = Literal["correctness_rate"]
"""`correctness_rate`: the share of correct ones among the last attempts."""


class DifficultyBucketer:
    """Rates questions by their last attempts, and puts rates into tiers.

    By itself it is told of attempts by `update`; in a `TrajectoryBuffer` it is told by `add`, and is read only.
    """

    def __init__(self, metric: Metric = "correctness_rate", window_size: int = 100) -> None:
        """
        Args:
            metric: what a rate is; see `Metric`.
            window_size: attempts of a question, 1 to 128, over which it is taken; older ones are forgotten.

        Raises:
            ValueError: a metric there is not, or a window out of range.
        """
        if metric not in get_args(Metric):
            raise ValueError(f"metric = {metric!r}: must be one of {', '.join(get_args(Metric))}")
        if not 1 <= window_size <= MAX_WINDOW:
            raise ValueError(f"window_size = {window_size}: must be from 1 to {MAX_WINDOW}")
        self.metric, self.window_size = metric, window_size
        self._ids = IdTable()
        self._stats = QuestionStats(StatsKept(window=window_size), self._ids)
        self._read_only = False

    def update(self, question_id: str, *correct: bool) -> float:
        """Take in attempts at a question, in their order; returns its rate from now on.

        Raises:
            ValueError: the bucketer belongs to a buffer, which is told by `add`.
        """
        if self._read_only:
            raise ValueError("this bucketer belongs to a buffer: tell the buffer of attempts, by add")
        self._stats.observe(self._ids.intern(question_id), _attempts(question_id, correct), step=0)
        return self.rate(question_id)

    def rate(self, question_id: str) -> float:
        """0 (never correct) to 1 (always); NaN for a question without attempts."""
        return float(self._stats.window_rates(self._stats.rows([question_id]))[0])

    def num_attempts(self, question_id: str) -> int:
        """Of the question so far, forgotten ones included."""
        return self._stats.attempts(question_id)

    def tier(self, question_id: str, num_tiers: int = 5) -> int:
        """1 (hardest) to `num_tiers` (easiest): the rate in steps of 1 / (num_tiers + 1), rounded.

        Raises:
            ValueError: the question has no attempts.
        """
        rate = self.rate(question_id)
        if np.isnan(rate):
            raise ValueError(f"question {question_id!r} has no attempts, and so no tier")
        return int(bucket_of(np.array([rate]), num_tiers + 1)[0])

    def _of(self, stats: QuestionStats) -> DifficultyBucketer:
        """The same rule over the statistics of a buffer."""
        bound = DifficultyBucketer(self.metric, self.window_size)
        bound._ids, bound._stats, bound._read_only = stats.ids, stats, True
        return bound


def _attempts(question_id: str, correct: tuple[bool, ...]) -> Group:
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    members = tuple(Trajectory(*nothing, float(one), False, "stop", 0) for one in correct)
    return Group(Question(question_id, nothing[0], answer=""), members)
