"""Warnings when a run's data or experience runs dry or grows stale: one each time a number passes its threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.config import AlarmsConfig


@dataclass(frozen=True)
class Alarm:
    """One alarm: `metric` beyond the threshold of its key, and what to do about it."""

    metric: str
    below: bool
    """Rings below the threshold; else above it."""
    what: str
    remedy: str


ALARMS: dict[str, Alarm] = {
    "min_data_left": Alarm(
        "freshness/data_left", True, "share of the training questions that are not retired",
        "add questions (data.train), bring retired ones back (experience.return_retired), or end the run here",
    ),
    "drain_before_end": Alarm(
        "freshness/steps_left", True, "steps until every question is retired, at the rate of the last steps",
        "add questions (data.train), bring retired ones back (experience.return_retired), or lower grpo.max_num_steps",
    ),
    "min_epochs_left": Alarm(
        "freshness/epochs_left", True, "epochs until every question is retired, at the rate of the last steps",
        "add questions (data.train), or bring retired ones back (experience.return_retired)",
    ),
    "max_mean_age_steps": Alarm(
        "freshness/age_steps_mean", False, "mean age of the replayed answers in steps",
        "keep fewer and newer answers (experience.max_answers_per_question, max_answers), or lower "
        "experience.replay_ratio",
    ),
    "max_mean_age_versions": Alarm(
        "freshness/age_versions_mean", False, "mean age of the replayed answers in optimiser steps",
        "keep fewer and newer answers (experience.max_answers_per_question, max_answers), or lower "
        "experience.replay_ratio",
    ),
    "max_duplicates": Alarm(
        "freshness/duplicates", False, "share of correct new answers that were stored already",
        "sampling repeats itself: look at policy/entropy; raise policy.generation.temperature or loss_fn.entropy_coeff",
    ),
    "max_repeated": Alarm(
        "freshness/repeated", False, "share of replayed questions that were replayed shortly before",
        "the buffer is small for what is drawn from it: lower experience.replay_ratio or replay_probability, or "
        "collect longer before replay starts",
    ),
    "max_uses_per_answer": Alarm(
        "freshness/uses_per_answer", False, "replays in the run for each answer stored",
        "lower experience.replay_ratio or replay_probability if held-out pass rates do not keep up",
    ),
}  # fmt: skip
"""By their key in `experience.alarms`."""


class Alarms:
    """Knows which alarms ring; one that rings says nothing more until its number has been back."""

    def __init__(self, config: AlarmsConfig, last_step: int) -> None:
        """`last_step`: of the whole run."""
        self._config = config
        self._last_step = last_step
        self._ringing: set[str] = set()

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Take in a step's metrics; the warnings of alarms that begin to ring. A number that the step does not have
        changes nothing."""
        warnings = []
        for name, alarm in ALARMS.items():
            threshold, value = self._threshold(name, step), metrics.get(alarm.metric)
            if threshold is None:
                self._ringing.discard(name)
            elif value is not None:
                beyond = value < threshold if alarm.below else value > threshold
                if beyond and name not in self._ringing:
                    warnings.append(self._warning(name, value, threshold))
                (self._ringing.add if beyond else self._ringing.discard)(name)
        return warnings

    def metrics(self, step: int) -> dict[str, float]:
        """1 or 0 for every alarm that is on."""
        on = [name for name in ALARMS if self._threshold(name, step) is not None]
        return {f"alarm/{name}": float(name in self._ringing) for name in on}

    def state_dict(self) -> dict[str, Any]:
        return {"ringing": sorted(self._ringing)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ringing = set(state["ringing"])

    def _threshold(self, name: str, step: int) -> float | None:
        """None: the alarm is off."""
        if name == "drain_before_end":
            return float(self._last_step - step) if self._config.drain_before_end else None
        found: float | None = getattr(self._config, name)
        return found

    def _warning(self, name: str, value: float, threshold: float) -> str:
        alarm = ALARMS[name]
        side = "below" if alarm.below else "above"
        key = f"experience.alarms.{name}"
        limit = f"{key} = {threshold:g}"
        if name == "drain_before_end":
            limit = f"the {threshold:g} steps left in the run ({key})"
        return f"{alarm.metric} = {value:.4g} is {side} {limit}: {alarm.what}. To do: {alarm.remedy}"
