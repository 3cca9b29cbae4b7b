"""What stands for the policy: the true pass rate of every question, and how training raises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import ConfigError

FloatArray = NDArray[np.float64]
Rows = NDArray[np.int64]
"""Numbers of questions."""

_SHIFT_BOUND, _SHIFT_HALVINGS = 40.0, 50
"""Search for the shift to a logged pass rate: +- so many logits, halved so often."""


@dataclass(frozen=True)
class Growth:
    """What training adds to the logit of a pass rate. All 0: nothing is learned."""

    new: float = 0.1
    """To its question: a group of K new answers that has an advantage."""
    replayed: float = 0.1
    """To its question: a replayed answer that has an advantage, in a group or in a replay step."""
    everywhere: float = 0.004
    """To every question: as many answers with an advantage as a step has answers; others in proportion."""

    @classmethod
    def parse(cls, text: str) -> Growth:
        """From `none`, or parts such as `new=0.1,everywhere=0`; what is not named keeps its default.

        Raises:
            ConfigError: an unknown name, or no finite number.
        """
        if text == "none":
            return cls(0.0, 0.0, 0.0)
        names = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            number = _number(value)
            if name not in names or number is None:
                raise ConfigError(
                    f"--growth {text!r}: {part!r} is not NAME=NUMBER with one of the names {', '.join(names)} (or give "
                    "--growth none)"
                )
            found[name] = number
        return cls(**found)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name):g}" for field in fields(self))


class Learner:
    """Pass rates of questions 0..N-1, kept as logits: 0 and 1 stay what they are."""

    def __init__(self, rates: FloatArray, growth: Growth, curve: Mapping[int, float] | None = None) -> None:
        """`curve`: step -> pass rate of the new answers, which every step that it names is made to have on average."""
        with np.errstate(divide="ignore"):
            self.logits = np.log(rates) - np.log1p(-rates)
        self._growth = growth
        self._curve = curve or {}

    def rates(self, rows: Rows) -> FloatArray:
        """True pass rates now, shape [rows]."""
        return _sigmoid(self.logits[rows])

    @property
    def mean_rate(self) -> float:
        """Over all questions."""
        return float(_sigmoid(self.logits).mean())

    def follow(self, step: int, rows: Rows, samples: Sequence[int]) -> None:
        """Shift all questions alike, so that these, each asked so often, have the curve's rate on average."""
        wanted = self._curve.get(step)
        if wanted is not None and len(rows):
            self.logits += _shift_to(wanted, self.logits[rows], np.asarray(samples, dtype=np.float64))

    def train(
        self,
        rows: Rows,
        replayed: NDArray[np.bool_],
        group_size: int,
        answers_of_a_step: int,
        lr_multiplier: float = 1.0,
    ) -> None:
        """Learn from answers that have an advantage; `rows` has the question of each."""
        growth = self._growth
        np.add.at(self.logits, rows, lr_multiplier * np.where(replayed, growth.replayed, growth.new / group_size))
        self.logits += lr_multiplier * growth.everywhere * len(rows) / answers_of_a_step


def _sigmoid(logits: FloatArray) -> FloatArray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def _shift_to(wanted: float, logits: FloatArray, weights: FloatArray) -> float:
    """What to add to the logits for a weighted mean rate of `wanted`, or the nearest that can be had."""
    low, high = -_SHIFT_BOUND, _SHIFT_BOUND
    for _ in range(_SHIFT_HALVINGS):
        middle = 0.5 * (low + high)
        below = np.average(_sigmoid(logits + middle), weights=weights) < wanted
        low, high = (middle, high) if below else (low, middle)
    # Where no shift can help (every rate is 0 or 1) the search ends at a bound: leave them alone.
    return 0.0 if abs(low) > 0.9 * _SHIFT_BOUND else low


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if np.isfinite(value) else None
