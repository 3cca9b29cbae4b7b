"""How hard a question is: its rate, 0 (hard) to 1 (easy), and the bucket 1..K-1 that stands for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import Difficulty
from exgrpo_megatron.experience.question_stats import QuestionStats, Rows, Values

Buckets = NDArray[np.int64]

_DECIMALS = 6
"""Of a rate made from a variance, which is kept in float32."""


def bucket_of(rates: Values, group_size: int) -> Buckets:
    """The rate in K-ths, rounded (halves up), within 1..K-1."""
    return np.clip(np.floor(rates * group_size + 0.5), 1, group_size - 1).astype(np.int64)


def variance_rate(mean: Values, variance: Values, worst: float = 0.0, best: float = 1.0) -> Values:
    """The rate p of right and wrong answers (rewards `best` and `worst`) with the given variance of rewards, which is
    p (1 - p) times the square of their distance.

    Of the two, the one on the side of the mean: below their middle or not. A variance above the largest possible, a
    quarter, counts as that. For rewards of these two values alone this is the share of right answers.
    """
    away = np.sqrt(np.maximum(0.25 - variance / (best - worst) ** 2, 0.0))
    rates: Values = np.where(mean < (worst + best) / 2, 0.5 - away, 0.5 + away)
    return np.round(rates, _DECIMALS)


class Rating:
    """Rates of questions, by one of the definitions of `experience.difficulty`."""

    def __init__(
        self, kind: Difficulty, group_size: int, stats: QuestionStats, rewards: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        """`rewards`: of the worst and the best answer."""
        self.kind, self.group_size, self.stats, self.rewards = kind, group_size, stats, rewards

    @property
    def is_bucket(self) -> bool:
        """Whether a rate is its bucket's, k/K, and nothing finer."""
        return self.kind == "last_group"

    def rates(self, rows: Rows, buckets: Buckets | int) -> Values:
        """Of questions in these buckets; the bucket's, k/K, where nothing else is known."""
        if self.is_bucket:
            return np.broadcast_to(np.asarray(buckets) / self.group_size, len(rows))
        rates = self._fine(rows)
        unknown = np.isnan(rates)
        if unknown.any():
            coarse = np.broadcast_to(np.asarray(buckets) / self.group_size, len(rows))
            rates[unknown] = coarse[unknown]
        return rates

    def bucket(self, row: int, k: int) -> int:
        """Where a question belongs whose last group, or the bucket it was in, had k right."""
        if self.is_bucket:
            return min(max(k, 1), self.group_size - 1)
        rates = self.rates(np.array([row]), np.array([k]))
        return int(bucket_of(rates, self.group_size)[0])

    def _fine(self, rows: Rows) -> Values:
        if self.kind == "window":
            return self.stats.window_rates(rows)
        return variance_rate(*self.stats.reward_moments(rows), *self.rewards)
