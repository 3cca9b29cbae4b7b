"""Which stored questions are drawn: those that may be, by cell, and how many of each cell."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import BucketWeight
from exgrpo_megatron.experience.buckets import Sizes, Weights, bucket_counts
from exgrpo_megatron.experience.difficulty import Rating, bucket_of
from exgrpo_megatron.experience.index import QuestionIndex

Places = NDArray[np.int64]
"""Places in the list of a cell, ascending."""
_DIGITS = 2048


@dataclass(frozen=True)
class Range:
    """Of rates, both ends included, or of quantiles of the rates of stored questions (of a category's, where there
    are several)."""

    low: float
    high: float
    unit: Literal["rate", "quantile"]


class Pool:
    """The stored questions that may be drawn. A cell of which all may be is never looked at."""

    def __init__(self, index: QuestionIndex) -> None:
        self._index = index
        self._sizes = index.cell_sizes
        self._allowed: dict[int, Places] = {}
        """Of cells of which not all may be."""
        self._excluded: list[list[int]] = []
        self._known_rates: dict[int, NDArray[np.float64]] = {}

    @property
    def sizes(self) -> Sizes:
        """Questions that may be drawn from each cell, shape [categories, K - 1]."""
        return self._sizes

    def keep_range(self, wanted: Range, rating: Rating) -> None:
        """Leave out questions whose rate is outside."""
        for category, (low, high) in enumerate(self._limits(wanted, rating)):
            self._keep_rates(category, low, high, rating)

    def keep_entropies_up_to(self, limit: float) -> None:
        """Leave out questions without an answer of at most that entropy."""
        fits = self._index.entropies <= np.float32(limit)
        for cell in np.flatnonzero(self._sizes).tolist():
            rows, places = self._index.listed(cell), self._allowed.get(cell)
            self._keep(cell, np.flatnonzero(fits.take(rows)) if places is None else places[fits[rows[places]]])

    def exclude(self, question_ids: Collection[str]) -> None:
        """Leave out these, at the end."""
        self._excluded = self._index.positions(question_ids)
        for cell, places in enumerate(self._excluded):
            if cell not in self._allowed:
                self._sizes.flat[cell] -= len(places)
            elif places:
                allowed = self._allowed[cell]
                found = np.searchsorted(allowed, places)
                there = [at for at, place in zip(found.tolist(), places, strict=True) if place in allowed[at : at + 1]]
                self._keep(cell, np.delete(allowed, there) if there else allowed)

    def sample(self, cell: int, count: int, rng: np.random.Generator) -> list[str]:
        """`count` distinct questions of a cell, each of those that may be with the same probability."""
        if cell not in self._allowed:
            return self._index.sample(cell, count, self._excluded[cell], rng)
        places = self._allowed[cell]
        chosen = places[rng.choice(len(places), size=count, replace=False)]
        return [self._index.ids.name(row) for row in self._index.listed(cell)[chosen].tolist()]

    def _limits(self, wanted: Range, rating: Rating) -> list[tuple[float, float]]:
        """Rates between which a question may be drawn, by category."""
        sizes = self._index.cell_sizes
        if wanted.unit == "rate":
            return [(wanted.low, wanted.high)] * len(sizes)
        return [
            (self._quantile(category, ends, wanted.low, rating), self._quantile(category, ends, wanted.high, rating))
            for category, ends in enumerate(np.cumsum(sizes, axis=1))
        ]

    def _quantile(self, category: int, ends: Sizes, share: float, rating: Rating) -> float:
        """The smallest rate of a stored question that at least this share of them do not exceed; `ends`: questions of
        the category up to each bucket."""
        if not ends[-1]:
            return 0.0
        # Buckets ascend with the rates of their questions: only one of them has to be looked into.
        place = max(int(np.ceil(share * ends[-1])) - 1, 0)
        bucket = int(np.searchsorted(ends, place, side="right"))
        if rating.is_bucket:
            return (bucket + 1) / rating.group_size
        rates = self._rates(category * len(ends) + bucket, rating)
        place -= int(ends[bucket - 1]) if bucket else 0
        return at_place(rates, place)

    def _keep_rates(self, category: int, low: float, high: float, rating: Rating) -> None:
        """Only the two buckets at the ends can have questions on both sides of a limit."""
        first, last = bucket_of(np.array([low, high]), rating.group_size).tolist()
        for bucket in range(1, self._index.num_buckets + 1):
            cell = category * self._index.num_buckets + bucket - 1
            outside = rating.is_bucket and not low <= bucket / rating.group_size <= high
            if outside or not first <= bucket <= last:
                self._keep(cell, np.zeros(0, np.int64))
            elif bucket in (first, last) and not rating.is_bucket:
                rates = self._rates(cell, rating)
                self._keep(cell, np.flatnonzero((rates >= low) & (rates <= high)))

    def _rates(self, cell: int, rating: Rating) -> NDArray[np.float64]:
        if cell not in self._known_rates:
            rows = self._index.listed(cell).astype(np.int64)
            self._known_rates[cell] = rating.rates(rows, cell % self._index.num_buckets + 1)
        return self._known_rates[cell]

    def _keep(self, cell: int, places: Places) -> None:
        if len(places) < len(self._index.listed(cell)):
            self._allowed[cell] = places
        self._sizes.flat[cell] = len(places)


def draw_questions(
    pool: Pool, n: int, weight: BucketWeight, sigma: float, stored: Sizes, rng: np.random.Generator
) -> list[str]:
    """Min(n, available) distinct questions: of each category by its number of questions, a bucket by its weight, then
    uniformly within it.

    `stored`: questions of every cell, shape [categories, K - 1]. With several categories they say where in its own a
    bucket is, and its weight is that of the rate there.
    """
    shares = [n] if len(stored) == 1 else _shares(n, pool.sizes.sum(axis=1), rng)
    drawn = []
    for category in np.flatnonzero(shares).tolist():
        sizes = pool.sizes[category]
        ranks = None if len(stored) == 1 else mean_ranks(stored[category])
        counts = bucket_counts(weight, int(shares[category]), sizes, sigma, rng, ranks)
        for bucket in np.flatnonzero(counts).tolist():
            drawn += pool.sample(category * len(sizes) + bucket, int(counts[bucket]), rng)
    return [drawn[i] for i in rng.permutation(len(drawn))]


def mean_ranks(sizes: Sizes) -> Weights:
    """Of each bucket the mean rank of its questions among all, from 0 to 1: 1/4 and 3/4 of two equal halves."""
    ends = np.cumsum(sizes)
    return (ends - sizes / 2) / max(int(ends[-1]), 1)


def at_place(rates: NDArray[np.float64], place: int) -> float:
    """What stands at a place of the rates, all within 0..1, in ascending order. They are counted by their leading
    digits, so that only those that share them are put in order."""
    digits = (rates * _DIGITS).astype(np.intp)
    ends = np.cumsum(np.bincount(digits))
    found = int(np.searchsorted(ends, place, side="right"))
    place -= int(ends[found - 1]) if found else 0
    return float(np.partition(rates[digits == found], place)[place])


def _shares(n: int, sizes: Sizes, rng: np.random.Generator) -> Sizes:
    return rng.multivariate_hypergeometric(sizes, min(n, int(sizes.sum())), method="marginals")
