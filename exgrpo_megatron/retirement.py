"""What follows for new questions from retiring some, and the return of retired ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.config import whole_share
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.parts import Parts

QUESTIONS_BEYOND_A_BATCH = 20
"""The stream of new questions is never reduced to fewer than a batch and these, as in the released code."""


@dataclass(frozen=True)
class Retired:
    """What was done after a step."""

    kept: list[str]
    """Questions retired in the step that stay among the new ones."""
    num_returned: int
    """Retired questions brought back, to be new from the next step on."""
    total_returned: int
    """In the run so far."""


class Retirement:
    """The line of new questions without retired ones, as the recipe has it; the same on every process."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._total_returned = 0
        self._released: list[str] = []

    def after_step(self, step: int, report: RecordReport) -> Retired:
        """Leave the step's retired questions out of later epochs, and bring back those whose turn it is, which becomes
        events of the report."""
        config, kept = self._parts.config, []
        report.events[:0] = [Event(question_id, "returned") for question_id in self._released]
        self._released = []
        if config.experience.retire_from == "replay_and_fresh":
            reserve = config.grpo.num_prompts_per_step + QUESTIONS_BEYOND_A_BATCH
            kept = self._parts.order.remove(report.retired, reserve)
        returned = self._bring_back(step)
        report.events += [Event(question_id, "returned") for question_id in returned]
        self._total_returned += len(returned)
        return Retired(kept, len(returned), self._total_returned)

    def release(self) -> int:
        """After a resume, bring back every question that the run retired under another recipe, where that of now says
        `experience.retire_from: never`; returns how many. Events of the next step."""
        config, experience = self._parts.config, self._parts.experience
        if not config.experience.enabled or config.experience.retire_from != "never" or not experience.num_retired:
            return 0
        self._released = sorted(experience.retired)
        experience.bring_back(self._released)
        self._parts.order.bring_back(self._released, generator(config.grpo.seed, 0, "return"))
        return len(self._released)

    def state_dict(self) -> dict[str, Any]:
        return {"total_returned": self._total_returned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._total_returned = state["total_returned"]

    def _bring_back(self, step: int) -> list[str]:
        config, experience = self._parts.config, self._parts.experience
        returned = config.experience.return_retired
        if returned is None or step % returned.period or not experience.num_retired:
            return []
        # By name: the set's own order differs between processes.
        retired = sorted(experience.retired)
        rng = generator(config.grpo.seed, step, "return")
        count = max(1, whole_share(returned.share, len(retired)))
        names = [retired[i] for i in rng.choice(len(retired), size=count, replace=False).tolist()]
        experience.bring_back(names)
        self._parts.order.bring_back(names, rng)
        return names
