"""ExGRPO, Algorithm 1 of arXiv:2510.02245. `Trainer.step` is its loop body; docs/algorithm.md maps the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exgrpo_megatron.algorithm.batch import balanced_shares, minibatches, objective, train_sequences
from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.algorithm.replay_schedule import ReplaySchedule
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.graded_rollouts import GradedRollouts
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.replay_draw import ReplayDraw
from exgrpo_megatron.rewards.alarm import RewardAlarm
from exgrpo_megatron.step_metrics import StepClock, StepRecord, pass_rate, step_metrics, step_warnings
from exgrpo_megatron.types import Group, Question, Slot, UpdateResult

QUESTIONS_BEYOND_A_BATCH = 20
"""The stream of new questions is never reduced to fewer than a batch and these, as in the released code."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, identical on every data-parallel rank."""

    step: int
    groups: list[Group]
    metrics: dict[str, float]
    warnings: list[str]


class Trainer:
    """Runs training steps; `state_dict` and the parts' own states are all a resume needs."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.schedule = ReplaySchedule(parts.config.experience)
        self.alarm = RewardAlarm(parts.config.env.math)
        self.replay = ReplayDraw(parts)
        self.questions = self.replay.questions
        self.rollouts = GradedRollouts(parts)
        self.last_step = 0
        self.skipped_updates = 0

    def fit(self, until: int, after_step: Callable[[StepResult], bool]) -> None:
        """Steps up to number `until`; stops early where `after_step` answers False."""
        self.push_weights()
        while self.last_step < until:
            if not after_step(self.step()):
                return

    def step(self) -> StepResult:
        """One iteration: questions, rollouts, rewards, updates, experience."""
        step, clock, mixed = self.last_step + 1, StepClock(), self.schedule.on
        with clock.phase("draw"):
            drawn = self.replay.draw(step, mixed=mixed)
        with clock.phase("select"):
            selection = self.replay.select(drawn.replayed, step)
        slots = [*selection.slots, *(self._fresh_slot(question, step) for question in drawn.fresh)]
        groups, verdicts = self.rollouts.groups(slots, step, clock)
        with clock.phase("update"):
            updates = self._update(groups, step, mixed)
        with clock.phase("push"):
            self.push_weights()
        with clock.phase("record"):
            report, retired_kept = self._record(groups, step)
        self.last_step = step
        record = StepRecord(
            groups=groups,
            verdicts=verdicts,
            updates=updates,
            report=report,
            replay_ages=[step - slot.stored.step for slot in selection.slots if slot.stored],
            num_scored=selection.num_scored,
            num_padded=selection.num_padded,
            num_discarded=drawn.num_discarded,
            retired_kept=retired_kept,
            mixed=mixed,
            total_skipped=self.skipped_updates,
        )
        metrics = step_metrics(self.parts, record, clock)
        return StepResult(step, groups, metrics, [*self.alarm.observe(verdicts), *step_warnings(record)])

    def push_weights(self) -> None:
        """Give the rollout engine the policy's weights."""
        self.parts.engine.load_weights(self.parts.policy.export_weights(), self.parts.policy.version)

    def state_dict(self) -> dict[str, Any]:
        """Position in the run; JSON-able. Policy and experience are saved beside it by their own `save`."""
        return {
            "step": self.last_step,
            "skipped_updates": self.skipped_updates,
            "schedule": self.schedule.state_dict(),
            "alarm": self.alarm.state_dict(),
            "order": self.parts.order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.last_step = state["step"]
        self.skipped_updates = state["skipped_updates"]
        self.schedule.load_state_dict(state["schedule"])
        self.alarm.load_state_dict(state["alarm"])
        self.parts.order.load_state_dict(state["order"])

    def _fresh_slot(self, question: Question, step: int) -> Slot:
        """A new question, with a demonstration if the recipe has them."""
        demonstrations = self.parts.demonstrations
        return Slot(question, demonstrations.of(question, step) if demonstrations else None)

    def _update(self, groups: list[Group], step: int, mixed: bool) -> list[UpdateResult]:
        """One optimiser step a minibatch of whole groups; each rank trains a token-balanced share."""
        config, comm = self.config, self.parts.comm
        per_micro_batch = config.loss_fn.entropy_bonus == "per_micro_batch"
        results = []
        rng = generator(config.grpo.seed, step, "minibatches")
        for part in minibatches(groups, config.updates_per_step, rng):
            sequences = train_sequences(part, config, data_parallel_size=comm.size)
            share = balanced_shares([sequence.num_tokens for sequence in sequences], comm.size)[comm.rank]
            result = self.parts.policy.update(
                [sequences[i] for i in share],
                objective(config, mixed=mixed),
                temperature=self.parts.sampling.temperature,
                micro_batch_entropy_coeff=config.loss_fn.entropy_coeff if per_micro_batch else 0.0,
            )
            self.skipped_updates += result.skipped
            results.append(result)
        return results

    def _record(self, groups: list[Group], step: int) -> tuple[RecordReport, list[str]]:
        """Store, retire, and decide whether replay starts with the next step.

        Returns the report, and the retired questions that nevertheless stay among the new ones.
        """
        report = self.parts.experience.record(
            groups, step=step, collect=self.schedule.collecting, truncated=not self.config.grpo.overlong_filtering
        )
        self.schedule.observe(pass_rate(groups))
        if self.config.experience.retire_from == "replay":
            return report, []
        reserve = self.config.grpo.num_prompts_per_step + QUESTIONS_BEYOND_A_BATCH
        return report, self.parts.order.remove(report.retired, reserve)
