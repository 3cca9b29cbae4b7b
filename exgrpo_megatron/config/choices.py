"""Names of strategies that more than one section chooses among."""

from __future__ import annotations

from typing import Literal

BucketWeight = Literal["counts", "accuracy", "linear", "sqrt", "linear_clip", "uniform"]
AnswerChoice = Literal[
    "lowest_mean_entropy", "lowest_total_entropy", "lowest_perplexity", "random", "shortest", "newest", "agreement"
]
Shaping = Literal["ratio", "normalized_ratio", "none", "sqrt", "clip", "log_prob"]
"""As in `exgrpo_kernels.reference`, which says what each is."""

SHAPINGS_WITH_BETA: tuple[Shaping, ...] = ("ratio", "normalized_ratio")
DEFAULT_BETA = 0.1
NORMAL_WEIGHTS: tuple[BucketWeight, ...] = ("counts", "accuracy")
"""Those that have a width."""

SHAPING_MEANING = (
    "ratio: w / (w + shaping_beta), the paper's; normalized_ratio: the same times (1 + b)^2 / b, so that a token pulls "
    "as hard as a new one at w = 1; none: w; sqrt: root of w; clip: w clipped as new tokens are; log_prob: log pi"
)


def check_beta(shaping: Shaping, beta: float) -> None:
    """Raise ValueError where `shaping_beta` is set and `shaping` has none."""
    if beta != DEFAULT_BETA and shaping not in SHAPINGS_WITH_BETA:
        raise ValueError(
            f"shaping_beta = {beta} has no effect with shaping = {shaping!r}: set it back, or shaping to one of "
            f"{', '.join(SHAPINGS_WITH_BETA)}"
        )
