"""ExGRPO, Algorithm 1 of arXiv:2510.02245. `Trainer.step` is its loop body; docs/algorithm.md maps the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from exgrpo_megatron.algorithm.batch import minibatches, objective, train_sequences
from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.algorithm.replay_step import replay_objective
from exgrpo_megatron.budget import Budget
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.graded_rollouts import GradedRollouts
from exgrpo_megatron.parts import Parts, update_shared
from exgrpo_megatron.ratio_cap import capped
from exgrpo_megatron.replay_control import ReplayControl, StepPlan
from exgrpo_megatron.replay_draw import ReplayDraw
from exgrpo_megatron.replay_step import ReplayStep
from exgrpo_megatron.retirement import Retired, Retirement
from exgrpo_megatron.rewards.alarm import RewardAlarm
from exgrpo_megatron.step_metrics import StepClock, StepRecord, step_events, step_metrics, step_warnings
from exgrpo_megatron.types import Group, Question, Slot, TrainSequence, UpdateResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step did, identical on every data-parallel rank."""

    step: int
    groups: list[Group]
    metrics: dict[str, float]
    warnings: list[str]
    events: list[Event]
    """What happened to the questions, for the run's history; none where logger.experience_history is false."""


class Trainer:
    """Runs training steps; `state_dict` and the parts' own states are all a resume needs."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.control = ReplayControl(parts)
        self.retirement = Retirement(parts)
        self.alarm = RewardAlarm(parts.config.env.math)
        self.replay = ReplayDraw(parts)
        self.replay_step = ReplayStep(parts, self.replay)
        self.questions = self.replay.questions
        self.rollouts = GradedRollouts(parts)
        self.budget = Budget()
        self.last_step = 0
        self.skipped_updates = 0

    def fit(self, until: int, after_step: Callable[[StepResult], bool]) -> None:
        """Steps up to number `until`; stops early where `after_step` answers False."""
        self.push_weights()
        while self.last_step < until:
            result = self._watched_step()
            with self.parts.comm.places.inside(f"after step {result.step}"):
                if not after_step(result):
                    return

    def step(self) -> StepResult:
        """One iteration: questions, rollouts, rewards, experience, updates."""
        step = self.last_step + 1
        clock = StepClock(step, self.parts.comm.places)
        plan = self.control.begin(step)
        with clock.phase("draw"):
            drawn = self.replay.draw(step, mixed=plan.in_groups)
        with clock.phase("select"):
            selection = self.replay.select(drawn.replayed, step)
        slots = [*selection.slots, *(self._fresh_slot(question, step) for question in drawn.fresh)]
        groups, verdicts = self.rollouts.groups(slots, step, clock)
        with clock.phase("record"):
            off_policy = self.parts.recent.off_policy_groups(groups, step) if self.parts.recent else []
            if self.parts.watch:
                self.parts.watch.groups([*groups, *off_policy])
            report, retired = self._record(groups, step)
        with clock.phase("update"):
            stored = self.replay_step.joining(step, on=plan.in_steps)
            updates, num_capped = self._update(groups, off_policy, stored.sequences, step, plan)
        with clock.phase("replay_step"):
            if not stored.sequences:
                stored = self.replay_step.run(step, on=plan.in_steps, cap=plan.ratio_cap)
        with clock.phase("push"):
            self.push_weights()
        self.skipped_updates += sum(update.skipped for update in [*updates, *stored.updates])
        self.budget.add(groups, len(stored.sequences) + sum(group.size for group in off_policy))
        self.last_step = step
        record = StepRecord(
            groups=groups,
            off_policy=off_policy,
            verdicts=verdicts,
            updates=updates,
            stored=stored,
            report=report,
            replay_ages=[step - slot.stored.step for slot in selection.slots if slot.stored],
            num_scored=selection.num_scored,
            num_padded=selection.num_padded,
            num_discarded=drawn.num_discarded,
            num_drawable=drawn.num_drawable if self.config.experience.in_groups else stored.num_drawable,
            retired=retired,
            num_capped=num_capped,
            mixed=plan.in_groups,
            total_skipped=self.skipped_updates,
            budget=self.budget,
        )
        with self.parts.comm.places.inside(f"step {step}: metrics"):
            metrics = step_metrics(self.parts, record, clock)
            more, warnings = self.control.finish(step, plan, record, selection.slots, metrics)
        warnings = [*self.alarm.observe(verdicts), *step_warnings(self.config, record), *warnings]
        return StepResult(step, groups, {**metrics, **more}, warnings, step_events(self.parts, record))

    def push_weights(self) -> None:
        """Give the rollout engine the policy's weights."""
        self.parts.engine.load_weights(self.parts.policy.export_weights(), self.parts.policy.version)

    def state_dict(self) -> dict[str, Any]:
        """Position in the run; JSON-able. Policy and experience are saved beside it by their own `save`."""
        return {
            "step": self.last_step,
            "skipped_updates": self.skipped_updates,
            **self.control.state_dict(),
            "retirement": self.retirement.state_dict(),
            "budget": self.budget.state_dict(),
            "alarm": self.alarm.state_dict(),
            "order": self.parts.order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.last_step = state["step"]
        self.skipped_updates = state["skipped_updates"]
        self.control.load_state_dict(state)
        # Older checkpoints have neither of the two.
        self.retirement.load_state_dict(state.get("retirement", self.retirement.state_dict()))
        self.budget = Budget.resumed(state.get("budget"))
        self.alarm.load_state_dict(state["alarm"])
        self.parts.order.load_state_dict(state["order"])
        released = self.retirement.release()
        if released and self.parts.comm.is_main:
            logger.warning("%d questions that were retired come back: experience.retire_from is 'never' now", released)

    def _watched_step(self) -> StepResult:
        """`step`, of which the batch is kept where it turns out bad."""
        watch = self.parts.watch
        if watch is None:
            return self.step()
        with watch.step(self.parts, self.last_step + 1):
            result = self.step()
        return replace(result, warnings=[*result.warnings, *watch.judge(self.parts, result.metrics)])

    def _fresh_slot(self, question: Question, step: int) -> Slot:
        """A new question, with a demonstration if the recipe has them."""
        demonstrations = self.parts.demonstrations
        return Slot(question, demonstrations.of(question, step) if demonstrations else None)

    def _update(
        self, groups: list[Group], off_policy: list[Group], stored: list[TrainSequence], step: int, plan: StepPlan
    ) -> tuple[list[UpdateResult], int]:
        """One optimiser step a minibatch of whole groups, with the off-policy groups of their questions, which stored
        answers may join; and how many replayed tokens a guard's clip left out."""
        config = self.config
        terms = replay_objective(config) if stored else objective(config, mixed=plan.in_groups)
        if plan.ratio_cap is not None:
            terms = replace(terms, clip=True)
        per_micro_batch = config.loss_fn.entropy_bonus == "per_micro_batch"
        results, num_capped = [], 0
        rng = generator(config.grpo.seed, step, "minibatches")
        for part in minibatches(groups, config.updates_per_pass, rng, num_passes=config.grpo.num_iterations):
            names, size = {group.question.id for group in part}, self.parts.comm.size
            theirs = [group for group in off_policy if group.question.id in names]
            sequences = train_sequences(part, config, data_parallel_size=size)
            sequences += train_sequences(theirs, config, data_parallel_size=size, off_policy=True) if theirs else []
            sequences, count = capped(self.parts, [*sequences, *stored], plan.ratio_cap)
            num_capped += count
            coeff = config.loss_fn.entropy_coeff if per_micro_batch else 0.0
            results.append(update_shared(self.parts, sequences, terms, micro_batch_entropy_coeff=coeff))
        return results, num_capped

    def _record(self, groups: list[Group], step: int) -> tuple[RecordReport, Retired]:
        """Store and retire, and what follows for new questions."""
        if self.parts.recent:
            self.parts.recent.record(groups)
        report = self.parts.experience.record(
            groups,
            step=step,
            collect=self.control.collecting,
            truncated=not self.config.grpo.overlong_filtering,
        )
        return report, self.retirement.after_step(step, report)
