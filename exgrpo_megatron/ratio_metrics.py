"""Importance ratios of many tokens in a few numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ratio_summary(prefix: str, log_ratios: NDArray[np.floating]) -> dict[str, float]:
    """Spread of w = exp(log ratio) as `<prefix>/<stat>`, for every stat of `RATIO_STATS`; nothing for no tokens.

    `log_ratios` has shape [tokens]. The effective sample size is a share of n: 1 where all w are equal, 1/n where one
    outweighs all others. It does not overflow, whatever the ratios; the others may reach infinity.
    """
    if log_ratios.size == 0:
        return {}
    exponents = log_ratios.astype(np.float64).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.exp(exponents)
        # The share does not change when all w are divided by the largest, and then nothing overflows.
        scaled = np.exp(exponents - exponents.max())
        share = scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum())
        p01, p50, p99 = np.quantile(ratios, [0.01, 0.5, 0.99])
        k1, k3 = -exponents.mean(), (ratios - 1 - exponents).mean()
    extremes = {"min": ratios.min(), "p01": p01, "p50": p50, "p99": p99, "max": ratios.max()}
    stats = {**extremes, "ess": share, "k1": k1, "k3": k3}
    return {f"{prefix}/{stat}": float(value) for stat, value in stats.items()}


def mean_shaped(log_ratios: NDArray[np.floating], beta: float) -> float:
    """Mean over tokens of f(w) = w / (w + beta), for w = exp(log ratio); it does not overflow."""
    with np.errstate(over="ignore"):
        return float((1 / (1 + beta * np.exp(-log_ratios.astype(np.float64)))).mean())
