"""What a buffer is made with: checked, and as the section that the trainer's buffer is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from exgrpo_megatron.config import Eviction, ExperienceConfig

MAX_TIERS = 1000


def check_settings(
    max_size: int, tiers: int, percentiles: Sequence[float], per_question: int | None, eviction: str
) -> None:
    """Raises ValueError where one is out of range; names it."""
    for name, value, highest in (
        ("max_size", max_size, None),
        ("difficulty_tiers", tiers, MAX_TIERS),
        ("max_per_question", per_question, None),
    ):
        if value is not None and not 1 <= value <= (highest or value):
            raise ValueError(f"{name} = {value}: must be at least 1{f' and at most {highest}' if highest else ''}")
    if not all(0 < share < 100 for share in percentiles) or len(set(percentiles)) < len(percentiles):
        raise ValueError(f"entropy_percentiles = {list(percentiles)}: must be different numbers between 0 and 100")
    if eviction not in get_args(Eviction):
        raise ValueError(f"eviction = {eviction!r}: must be one of {', '.join(get_args(Eviction))}")


def section_of(settings: Mapping[str, Any]) -> ExperienceConfig:
    """What the trainer's buffer is told: rates by the metric, nothing retires, entropies are known if asked for."""
    return ExperienceConfig(
        bucket_weight="counts",
        difficulty="window" if settings["metric"] == "correctness_rate" else "reward_variance",
        difficulty_window=settings["window_size"],
        entropy_percentile=max(settings["entropy_percentiles"], default=None),
        retire_from="never",
        max_answers=settings["max_size"],
        max_answers_per_question=settings["max_per_question"],
        eviction=settings["eviction"],
    )
