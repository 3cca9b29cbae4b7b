"""How fresh a run's experience is, and how long its data will last: from counts and ages alone, alike on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exgrpo_megatron.config import AlarmsConfig
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.types import StoredAnswer


@dataclass(frozen=True)
class StepSeen:
    """What of a step this looks at."""

    step: int
    version: int
    """Of the weights that the step began with."""
    num_retired: int
    """Retired questions after the step."""
    num_fresh: int
    """New questions that left the line, those thrown away included."""
    num_returned: int
    """Retired questions brought back after the step."""
    epoch_length: int
    """Questions of the next epoch."""
    replayed: Sequence[tuple[str, StoredAnswer]]
    """Replayed answers with their questions, of groups and of replay steps."""
    report: RecordReport


class Freshness:
    """Watches whole steps; what it remembers is small and in checkpoints."""

    def __init__(self, config: AlarmsConfig, num_questions: int) -> None:
        self._num_questions = num_questions
        self._retired = deque[int](maxlen=config.average_steps)
        self._fresh = deque[int](maxlen=config.average_steps)
        self._recent = deque[list[str]](maxlen=config.repeat_steps)
        self._num_replays = 0
        self._num_stored: int | None = None

    def begin(self, num_answers: int) -> None:
        """Before a step, with the number of stored answers: those that a run begins with were stored elsewhere."""
        if self._num_stored is None:
            self._num_stored = num_answers

    def observe(self, seen: StepSeen) -> dict[str, float]:
        """Take in a step; returns its metrics, without those that have no value in it."""
        assert self._num_stored is not None, "observe without begin"
        self._retired.append(len(seen.report.retired) - seen.num_returned)
        self._fresh.append(seen.num_fresh)
        self._num_replays += len(seen.replayed)
        self._num_stored += seen.report.stored
        left = self._num_questions - seen.num_retired
        metrics = {
            "freshness/data_left": left / self._num_questions,
            **self._time_left(left, seen.epoch_length),
            **_ages(seen),
            **_duplicates(seen.report),
            **self._repeated([question_id for question_id, _ in seen.replayed]),
        }
        if self._num_stored:
            metrics["freshness/uses_per_answer"] = self._num_replays / self._num_stored
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "retired": list(self._retired),
            "fresh": list(self._fresh),
            "recent": list(self._recent),
            "replays": self._num_replays,
            "stored": self._num_stored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the steps remembered, the newest that the recipe now asks for."""
        for name in ("retired", "fresh", "recent"):
            memory = getattr(self, f"_{name}")
            memory.clear()
            memory.extend(state[name])
        self._num_replays, self._num_stored = state["replays"], state["stored"]

    def _time_left(self, left: int, epoch_length: int) -> dict[str, float]:
        """Until every question is retired, at the mean net retirement of the last steps; none while questions come back
        as fast as they go, or before there are as many steps as are averaged."""
        retired = sum(self._retired)
        if retired <= 0 or len(self._retired) < (self._retired.maxlen or 0):
            return {}
        steps = left * len(self._retired) / retired
        fresh_per_step = sum(self._fresh) / len(self._fresh)
        return {
            "freshness/steps_left": steps,
            "freshness/epochs_left": steps * fresh_per_step / max(1, epoch_length),
        }

    def _repeated(self, question_ids: list[str]) -> dict[str, float]:
        before = {name for names in self._recent for name in names}
        self._recent.append(question_ids)
        if not question_ids:
            return {}
        return {"freshness/repeated": sum(name in before for name in question_ids) / len(question_ids)}


def _ages(seen: StepSeen) -> dict[str, float]:
    steps = [seen.step - answer.step for _, answer in seen.replayed]
    # The versions of a prefilled answer's weights, stored at step 0, are those of another run.
    versions = [seen.version - answer.policy_version for _, answer in seen.replayed if answer.step > 0]
    metrics: dict[str, float] = {}
    for unit, values in (("steps", steps), ("versions", versions)):
        if values:
            metrics[f"freshness/age_{unit}_mean"] = float(np.mean(values))
            metrics[f"freshness/age_{unit}_median"] = float(np.median(values))
            metrics[f"freshness/age_{unit}_max"] = max(values)
    return metrics


def _duplicates(report: RecordReport) -> dict[str, float]:
    found = report.stored + report.duplicates
    return {"freshness/duplicates": report.duplicates / found} if found else {}
