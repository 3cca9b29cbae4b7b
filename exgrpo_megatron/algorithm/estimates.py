"""avg@k, pass@k and maj@k of one question, and their means over questions with bootstrap intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.config import EvalSetConfig

Values = NDArray[np.float64]
LEVEL = 0.95
_DRAWS_AT_ONCE = 2**22
"""Question numbers held at a time while resampling."""


@dataclass(frozen=True)
class Estimate:
    """A mean over questions, or over the means of several sets."""

    value: float
    low: float | None
    high: float | None
    """Ends of the 95% interval; None where a set has one question alone, which tells nothing of others."""

    def as_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, have a correct one: 1 - C(n-c, k) / C(n, k), the
    unbiased estimator of Chen et al. 2021 (arXiv:2107.03374)."""
    assert 1 <= k <= num_samples
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is right.

    Answers are equal where their texts are; None has no vote, and a question without votes counts 0. Among answers with
    equally many votes one is drawn: the value is the mean over them. An answer whose text was judged differently (a
    grader that ran out of time) counts by the share of its votes that were judged right.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    tied = [np.mean(rights) for rights in votes.values() if len(rights) == most]
    return float(np.mean(tied))


def question_values(config: EvalSetConfig, answers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Values]:
    """avg@k, pass@k and, of several samples, maj@k of every question, by name and in this order.

    `answers`: of each question all samples, as rows with `correct` and `extracted`.
    """
    n = config.num_samples
    right = np.array([[row["correct"] for row in group] for group in answers], dtype=np.float64)
    counts = right.sum(axis=1).astype(int).tolist()
    values: dict[str, Values] = {f"avg@{n}": right.mean(axis=1)}
    for k in config.pass_ks:
        values[f"pass@{k}"] = np.array([pass_at_k(n, c, k) for c in counts])
    if n > 1:
        votes = [([row["extracted"] for row in group], [row["correct"] for row in group]) for group in answers]
        values[f"maj@{n}"] = np.array([majority_at_k(texts, rights) for texts, rights in votes])
    return values


def bootstrap_means(values: Mapping[str, Values], num_resamples: int, seed: int) -> dict[str, Values]:
    """Of each quantity, given as one value a question, the means over `num_resamples` draws of as many questions with
    replacement; shape [resamples]. All quantities see the same draws."""
    num_questions = len(next(iter(values.values())))
    rng = np.random.default_rng(seed)
    rows = max(1, _DRAWS_AT_ONCE // num_questions)
    means: dict[str, list[Values]] = {name: [] for name in values}
    for first in range(0, num_resamples, rows):
        drawn = rng.integers(num_questions, size=(min(rows, num_resamples - first), num_questions))
        for name, of_question in values.items():
            means[name].append(of_question[drawn].mean(axis=1))
    return {name: np.concatenate(parts) for name, parts in means.items()}


def bootstrap_seed(seed: int, set_name: str) -> int:
    """Of the draws of a set: sets are drawn independently of each other."""
    return stable_seed(seed, set_name, "bootstrap")


def estimate(values: Values, resampled: Values) -> Estimate:
    """The mean over questions, between the percentiles of its resampled means."""
    return _between(float(values.mean()), resampled if len(values) > 1 else None)


def macro_average(means: Sequence[float], resampled: Sequence[Values | None]) -> Estimate:
    """The mean over sets, each with equal weight whatever its size, and the percentiles of the same mean of their
    resampled means; None: a set of one question."""
    drawn = [values for values in resampled if values is not None]
    return _between(float(np.mean(means)), np.mean(drawn, axis=0) if len(drawn) == len(means) else None)


def _between(value: float, resampled: Values | None) -> Estimate:
    if resampled is None:
        return Estimate(value, None, None)
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
