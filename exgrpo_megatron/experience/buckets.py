"""Bucket k holds the questions last answered correctly k times of K; how many questions each gives to a draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import BucketWeight

Sizes = NDArray[np.int64]
"""Questions in buckets 1..K-1, shape [K - 1]."""
Weights = NDArray[np.float64]
"""Probabilities of buckets 1..K-1, shape [K - 1], sum 1."""


def bucket_counts(
    kind: BucketWeight, n: int, sizes: Sizes, sigma: float, rng: np.random.Generator, rates: Weights | None = None
) -> Sizes:
    """How many of `n` questions are drawn from each bucket; in all min(n, questions there are). `rates`: see below."""
    n = min(n, int(sizes.sum()))
    if kind == "uniform":
        # Bucket weights cannot say this exactly: with replacement over buckets, small buckets come out short.
        return rng.multivariate_hypergeometric(sizes, n)
    return draw_counts(n, bucket_weights(kind, sizes, sigma, rates), sizes, rng)


def bucket_weights(kind: BucketWeight, sizes: Sizes, sigma: float, rates: Weights | None = None) -> Weights:
    """Probability of each bucket, were none of them empty (`experience.bucket_weight`).

    `sizes` gives the number of buckets, and its values matter for `uniform` alone. `sigma` is the width of the normal
    weights, in correct answers for `counts` and in accuracy (k/K) for `accuracy`. `rates`: what stands for k/K, where
    that is not itself.
    """
    group_size = len(sizes) + 1
    k = np.arange(1, group_size, dtype=np.float64) if rates is None else rates * group_size
    match kind:
        case "counts":
            raw = _normal(k, group_size / 2, sigma)
        case "accuracy":
            raw = _normal(k / group_size, 0.5, sigma)
        case "linear":
            raw = k / group_size
        case "sqrt":
            raw = np.sqrt(k / group_size)
        case "linear_clip":
            raw = np.minimum(k / group_size, 0.5)
        case "uniform":
            raw = sizes.astype(np.float64) if sizes.any() else np.ones_like(k)
    return raw / raw.sum()


def draw_counts(n: int, weights: Weights, sizes: Sizes, rng: np.random.Generator) -> Sizes:
    """Multinomial counts, no bucket above its size; in all min(n, sizes.sum()).

    What a bucket cannot supply goes to buckets with room, by the original probabilities renormalised over these. All
    of an overflow is drawn again at once; this has the same law as moving its questions one at a time, because each
    question then follows its own sequence of choices until one has room, in whatever order they are served.
    """
    counts = np.zeros_like(sizes)
    missing = min(n, int(sizes.sum()))
    while missing:
        open_buckets = np.flatnonzero(counts < sizes)
        counts[open_buckets] += rng.multinomial(missing, _probabilities(open_buckets, weights, sizes - counts))
        missing = int(np.maximum(counts - sizes, 0).sum())
        np.minimum(counts, sizes, out=counts)
    return counts


def _normal(x: Weights, mean: float, sigma: float) -> Weights:
    """Normal density up to a factor, 1 at its largest, so that a small sigma cannot make every weight 0."""
    exponent = -0.5 * ((x - mean) / sigma) ** 2
    return np.exp(exponent - exponent.max())


def _probabilities(open_buckets: NDArray[np.intp], weights: Weights, room: Sizes) -> Weights:
    chosen = weights[open_buckets]
    if not chosen.any():
        # Weights far out under a narrow normal underflow to 0; the draw is still owed its full number.
        chosen = room[open_buckets].astype(np.float64)
    return chosen / chosen.sum()
