"""What decides about a step's replay beside the draw itself: schedule and guards; and what watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.algorithm.guards import Guards
from exgrpo_megatron.algorithm.replay_schedule import ReplaySchedule
from exgrpo_megatron.experience.alarms import Alarms
from exgrpo_megatron.experience.freshness import Freshness, StepSeen
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.step_metrics import StepRecord, pass_rate
from exgrpo_megatron.types import Slot


@dataclass(frozen=True)
class StepPlan:
    """What a step does, the same on every process."""

    replays: bool
    """Stored answers are replayed, and the objective is that of the mixed phase."""
    held: bool
    """A guard holds the step to a clip, or to on-policy training."""
    ratio_cap: float | None
    """Of the clip: new tokens have the PPO clip, replayed ones beyond this ratio no gradient; None: no such clip."""


class ReplayControl:
    """Plans each step before it begins and looks at it when it is done."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        experience, grpo = parts.config.experience, parts.config.grpo
        self.schedule = ReplaySchedule(experience, grpo.seed)
        self._guards = Guards(experience.guards)
        self._freshness = Freshness(experience.alarms, len(parts.train.questions))
        self._alarms = Alarms(experience.alarms, grpo.max_num_steps)
        self._version = 0

    def begin(self, step: int) -> StepPlan:
        """The plan of the step that begins now; call it once a step."""
        parts, loss = self._parts, self._parts.config.loss_fn
        self._version = parts.policy.version
        self._freshness.begin(parts.experience.num_answers)
        scheduled = self.schedule.begin(step, parts.order.next_epoch)
        replays = scheduled and not self._guards.forbids_replay(step)
        cap = parts.config.experience.guards.ratio_cap or 1 + loss.ratio_clip_max
        clips = replays and self._guards.clips(step)
        return StepPlan(replays, self._guards.held(step), cap if clips else None)

    def finish(
        self, step: int, plan: StepPlan, record: StepRecord, replayed: list[Slot], metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], list[str]]:
        """Take in a step that is done, with its metrics; further metrics, and warnings. Collective."""
        if not self._parts.config.experience.enabled:
            return {}, []
        fresh = [group for group in record.groups if not group.replayed]
        self.schedule.observe(pass_rate(fresh) if fresh else None)
        # The main process's word counts: another kind of machine may round a mean to the other side of a limit.
        crossed = self._parts.comm.broadcast(self._guards.crossed(metrics) if plan.replays else {})
        warnings = self._guards.observe(step, crossed)
        found = self._guards.metrics(crossed, held=plan.held)
        found |= self._freshness.observe(self._seen(step, record, replayed))
        warnings += self._alarms.observe(step, {**metrics, **found})
        return {**found, **self._alarms.metrics(step)}, warnings

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.state_dict(),
            "guards": self._guards.state_dict(),
            "freshness": self._freshness.state_dict(),
            "alarms": self._alarms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; other keys of `state` are passed over, and what an older checkpoint does not have
        begins here."""
        self.schedule.load_state_dict(state["schedule"])
        for name, part in (("guards", self._guards), ("freshness", self._freshness), ("alarms", self._alarms)):
            if name in state:
                part.load_state_dict(state[name])

    def _seen(self, step: int, record: StepRecord, replayed: list[Slot]) -> StepSeen:
        order = self._parts.order
        return StepSeen(
            step=step,
            version=self._version,
            num_retired=self._parts.experience.num_retired,
            num_fresh=len(record.groups) - len(replayed) + record.num_discarded,
            num_returned=record.retired.num_returned,
            epoch_length=order.num_active,
            replayed=[(slot.question.id, slot.stored) for slot in replayed if slot.stored],
            report=record.report,
        )
