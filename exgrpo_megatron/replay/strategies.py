"""Which questions a sample is of, and which answer of each: the strategies, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exgrpo_megatron.config import BucketWeight

Strategy = Literal["medium_difficulty_low_entropy", "medium_difficulty", "low_entropy", "uniform"]

DEFAULT_RANGE = (0.3, 0.7)
"""Rates of questions of medium difficulty."""


@dataclass(frozen=True)
class Rule:
    """Of a strategy: how tiers are weighed, whether the difficulty range and the entropy percentile hold, and which
    answer of a question is taken."""

    weight: BucketWeight
    in_range: bool
    low_entropy: bool


_RULES: dict[str, Rule] = {
    "medium_difficulty_low_entropy": Rule("counts", in_range=True, low_entropy=True),
    "medium_difficulty": Rule("counts", in_range=True, low_entropy=False),
    "low_entropy": Rule("uniform", in_range=False, low_entropy=True),
    "uniform": Rule("uniform", in_range=False, low_entropy=False),
}


def rule_of(
    strategy: str, difficulty_range: tuple[float, float] | None, entropy_percentile: float | None, *, scored: bool
) -> Rule:
    """The strategy's; raises ValueError where there is none, or where something is given that it would pass over."""
    if strategy not in _RULES:
        raise ValueError(f"strategy = {strategy!r}: must be one of {', '.join(_RULES)}")
    rule = _RULES[strategy]
    for name, given, used in (
        ("difficulty_range", difficulty_range is not None, rule.in_range),
        ("entropy_percentile", entropy_percentile is not None, rule.low_entropy),
        ("score", scored, rule.low_entropy),
    ):
        if given and not used:
            raise ValueError(f"{name} has no effect with strategy = {strategy!r}: leave it out")
    if difficulty_range is not None:
        check_range("difficulty_range", difficulty_range)
    return rule


def check_range(name: str, given: tuple[float, float]) -> None:
    """Raises ValueError where it is no range of rates."""
    low, high = given
    if not 0 <= low < high <= 1:
        raise ValueError(f"{name} = {tuple(given)}: must be two rates from 0 to 1, the first below the second")
