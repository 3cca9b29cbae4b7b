"""What decides about a step's replay beside the draw itself: schedule and guards; and what watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.algorithm.guards import Guards
from exgrpo_megatron.algorithm.replay_schedule import ReplaySchedule, ReplayStepSchedule
from exgrpo_megatron.experience.alarms import Alarms
from exgrpo_megatron.experience.freshness import Freshness, StepSeen
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.step_metrics import StepRecord, pass_rate
from exgrpo_megatron.types import Slot


@dataclass(frozen=True)
class StepPlan:
    """What a step does, the same on every process."""

    in_groups: bool
    """Stored answers join groups, and the objective is that of the mixed phase."""
    in_steps: bool
    """Replay steps follow, or stored answers join the update."""
    held: bool
    """A guard holds the step to a clip, or to on-policy training."""
    ratio_cap: float | None
    """Of the clip: new tokens have the PPO clip, replayed ones beyond this ratio no gradient; None: no such clip."""

    @property
    def replays(self) -> bool:
        return self.in_groups or self.in_steps


class ReplayControl:
    """Plans each step before it begins and looks at it when it is done."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        experience, grpo = parts.config.experience, parts.config.grpo
        self._schedule = ReplaySchedule(experience, grpo.seed)
        self._step_schedule = ReplayStepSchedule(experience)
        self._guards = Guards(experience.guards)
        self._freshness = Freshness(experience.alarms, len(parts.train.questions))
        self._alarms = Alarms(experience.alarms, grpo.max_num_steps)
        self._version = 0

    def begin(self, step: int) -> StepPlan:
        """The plan of the step that begins now; call it once a step."""
        parts, loss = self._parts, self._parts.config.loss_fn
        self._version = parts.policy.version
        self._freshness.begin(parts.experience.num_answers)
        allowed = not self._guards.forbids_replay(step)
        in_groups = self._schedule.begin(step, parts.order.next_epoch) and allowed
        in_steps = self._step_schedule.on and self._schedule.drawn(step) and allowed
        cap = parts.config.experience.guards.ratio_cap or 1 + loss.ratio_clip_max
        clips = (in_groups or in_steps) and self._guards.clips(step)
        return StepPlan(in_groups, in_steps, self._guards.held(step), cap if clips else None)

    @property
    def collecting(self) -> bool:
        """Whether correct answers of the step that has begun are to be stored."""
        return self._schedule.collecting or self._step_schedule.on

    def finish(
        self, step: int, plan: StepPlan, record: StepRecord, replayed: list[Slot], metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], list[str]]:
        """Take in a step that is done, with the slots replayed in groups and its metrics; returns further metrics, and
        warnings. Collective."""
        if not self._parts.config.experience.enabled:
            return {}, []
        fresh = [group for group in record.groups if not group.replayed]
        rate = pass_rate(fresh) if fresh else None
        self._schedule.observe(rate)
        self._step_schedule.observe(rate)
        # The main process's word counts: another kind of machine may round a mean to the other side of a limit.
        crossed = self._parts.comm.broadcast(self._guards.crossed(metrics) if plan.replays else {})
        warnings = self._guards.observe(step, crossed)
        found = self._guards.metrics(crossed, held=plan.held)
        if found and self._parts.config.experience.guards.action == "clip":
            found["guards/capped_tokens"] = record.num_capped + record.stored.num_capped
        found |= self._freshness.observe(self._seen(step, record, replayed))
        warnings += self._alarms.observe(step, {**metrics, **found})
        return {**found, **self._alarms.metrics(step)}, warnings

    def state_dict(self) -> dict[str, Any]:
        return {
            "schedule": self._schedule.state_dict(),
            "replay_step": self._step_schedule.state_dict(),
            "guards": self._guards.state_dict(),
            "freshness": self._freshness.state_dict(),
            "alarms": self._alarms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; other keys of `state` are passed over, and what an older checkpoint does not have
        begins here."""
        self._schedule.load_state_dict(state["schedule"])
        self._step_schedule.load_state_dict(state.get("replay_step", {"on": False}))
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
            replayed=[(slot.question.id, slot.stored) for slot in [*replayed, *record.stored.slots] if slot.stored],
            report=record.report,
        )
