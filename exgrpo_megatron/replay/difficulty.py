"""How hard questions are, by what became of the last attempts at each."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from exgrpo_megatron.experience.difficulty import bucket_of, variance_rate
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.question_stats import MAX_WINDOW, QuestionStats, StatsKept
from exgrpo_megatron.types import Group, Question, Trajectory

Metric = Literal["correctness_rate", "reward_variance"]
"""`correctness_rate`: the share of correct ones (reward above 0) among the last attempts. `reward_variance`, for
rewards from 0 to 1: the rate of right and wrong answers with the variance of the last rewards, on the side of their
mean."""
DEFAULT_WINDOW = 100


class DifficultyBucketer:
    """Rates questions by their last attempts, and puts rates into tiers.

    By itself it is told of attempts by `update`; in a `TrajectoryBuffer` it is told by `add`, and is read only.
    """

    def __init__(self, metric: Metric = "correctness_rate", window_size: int | None = None) -> None:
        """
        Args:
            metric: what a rate is; see `Metric`.
            window_size: for `correctness_rate`: attempts of a question, 1 to 128, over which it is taken; older ones
                are forgotten; 100 if not given. `reward_variance` is that of one `update`, or of one `add`.

        Raises:
            ValueError: a metric there is not, or a window out of range, or without effect.
        """
        if metric not in get_args(Metric):
            raise ValueError(f"metric = {metric!r}: must be one of {', '.join(get_args(Metric))}")
        if window_size is not None and not 1 <= window_size <= MAX_WINDOW:
            raise ValueError(f"window_size = {window_size}: must be from 1 to {MAX_WINDOW}")
        if metric == "reward_variance" and window_size is not None:
            raise ValueError(f"window_size = {window_size} has no effect with metric = {metric!r}: leave it out")
        self.metric = metric
        self.window_size = (window_size or DEFAULT_WINDOW) if metric == "correctness_rate" else None
        self._ids = IdTable()
        kept = StatsKept(window=self.window_size or 0, rewards=metric == "reward_variance")
        self._stats = QuestionStats(kept, self._ids)
        self._read_only = False

    def update(self, question_id: str, *rewards: float) -> float:
        """Take in the rewards (or True and False) of attempts at a question, in their order; returns its rate from now
        on.

        Raises:
            ValueError: the bucketer belongs to a buffer, which is told by `add`.
        """
        if self._read_only:
            raise ValueError("this bucketer belongs to a buffer: tell the buffer of attempts, by add")
        self._stats.observe(self._ids.intern(question_id), _attempts(question_id, rewards), step=0)
        return self.rate(question_id)

    def rate(self, question_id: str) -> float:
        """0 (never correct) to 1 (always); NaN for a question without attempts."""
        rows = self._stats.rows([question_id])
        if self.metric == "reward_variance":
            return float(variance_rate(*self._stats.reward_moments(rows))[0])
        return float(self._stats.window_rates(rows)[0])

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


def _attempts(question_id: str, rewards: tuple[float, ...]) -> Group:
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    members = tuple(Trajectory(*nothing, float(one), False, "stop", 0) for one in rewards)
    return Group(Question(question_id, nothing[0], answer=""), members)
