"""Warnings when the rewards say more about the verifier or the format than about the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.verifier import Status, Verdict

FORMAT_STATUSES: tuple[Status, ...] = ("no_box", "not_literal", "too_long")
FAILURE_STATUSES: tuple[Status, ...] = ("timeout", "error")

MAX_FAILURE_SHARE = 0.1
"""More time-outs and errors than this share of a step's answers is a warning."""


def verdict_counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many verdicts have each status; every status is there, also at 0."""
    counts = Counter(verdict.status for verdict in verdicts)
    return {status: counts[status] for status in get_args(Status)}


class RewardAlarm:
    """Watches the verdicts of whole steps (of all ranks, where there are several)."""

    def __init__(self, config: MathEnvConfig) -> None:
        self._config = config
        self._all_zero_steps = 0

    def observe(self, verdicts: Sequence[Verdict]) -> list[str]:
        """One warning text for each condition that holds after this step; a step without answers changes nothing."""
        if not verdicts:
            return []
        any_reward = any(verdict.reward != 0 for verdict in verdicts)
        self._all_zero_steps = 0 if any_reward else self._all_zero_steps + 1
        counts = verdict_counts(verdicts)
        return [*self._all_zero(counts), *self._format(counts), *_failures(counts)]

    def state_dict(self) -> dict[str, Any]:
        return {"all_zero_steps": self._all_zero_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._all_zero_steps = state["all_zero_steps"]

    def _all_zero(self, counts: dict[str, int]) -> list[str]:
        if self._all_zero_steps < self._config.all_zero_alarm_steps:
            return []
        return [
            f"every reward was 0 for {self._all_zero_steps} steps in a row (env.math.all_zero_alarm_steps = "
            f"{self._config.all_zero_alarm_steps}); this step: {_listed(counts)}. Look at some responses (`exgrpo "
            "eval RECIPE` writes them): is it the prompt template the model knows, are answers cut off, have the gold "
            "answers the expected form?"
        ]

    def _format(self, counts: dict[str, int]) -> list[str]:
        rejected, total = sum(counts[status] for status in FORMAT_STATUSES), sum(counts.values())
        if rejected <= self._config.format_alarm_share * total:
            return []
        return [
            f"the format rules rejected {rejected} of {total} answers (env.math.format_alarm_share = "
            f"{self._config.format_alarm_share}): {_listed(counts, FORMAT_STATUSES)}. Check that the prompt asks for "
            "\\boxed{} and that responses are long enough, or relax env.math.require_box, require_literal or "
            "max_boxed_chars."
        ]


def _failures(counts: dict[str, int]) -> list[str]:
    failed, total = sum(counts[status] for status in FAILURE_STATUSES), sum(counts.values())
    if failed <= MAX_FAILURE_SHARE * total:
        return []
    return [
        f"{failed} of {total} answers could not be graded and got 0: {_listed(counts, FAILURE_STATUSES)}. The machine "
        "is overloaded (raise env.math.timeout_s) or the model has learned to write expressions that cannot be "
        "evaluated (set env.math.require_literal), or env.reward_function fails, and a warning says how."
    ]


def _listed(counts: dict[str, int], statuses: Sequence[str] | None = None) -> str:
    return ", ".join(f"{status} {counts[status]}" for status in statuses or counts if counts[status])
