"""ExGRPO, Algorithm 1 of arXiv:2510.02245. `Trainer.step` is its loop body; docs/algorithm.md maps the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from exgrpo_megatron.algorithm.batch import balanced_shares, minibatches, objective, train_sequences
from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.algorithm.replay_schedule import ReplaySchedule, num_replayed
from exgrpo_megatron.comm import all_gather_concat
from exgrpo_megatron.experience.buffer import RecordReport
from exgrpo_megatron.experience.selection import choose_answer, needs_scoring
from exgrpo_megatron.experience.text_form import as_text_answer
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.rewards.alarm import RewardAlarm
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.rollout.protocol import SampleRequest
from exgrpo_megatron.step_metrics import StepClock, StepRecord, pass_rate, step_metrics, step_warnings
from exgrpo_megatron.types import Group, Question, StoredAnswer, TokenIds, Trajectory, UpdateResult

QUESTIONS_BEYOND_A_BATCH = 20
"""The stream of new questions is never reduced to fewer than a batch and these, as in the released code."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, identical on every data-parallel rank."""

    step: int
    groups: list[Group]
    metrics: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class _Slot:
    """One question of the batch: new, or replayed with the stored answer that joins its group."""

    question: Question
    stored: StoredAnswer | None


@dataclass(frozen=True)
class _Selection:
    """The replayed slots, how many stored answers were scored for them, and how many of the replayed log-probs the text
    form made up."""

    slots: list[_Slot]
    num_scored: int
    num_padded: int


class Trainer:
    """Runs training steps; `state_dict` and the parts' own states are all a resume needs."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.schedule = ReplaySchedule(parts.config.experience)
        self.alarm = RewardAlarm(parts.config.env.math)
        self.questions = {question.id: question for question in parts.train.questions}
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
            drawn, fresh, num_discarded = self._questions(step, mixed)
        with clock.phase("select"):
            selection = self._select_answers(drawn, step)
        slots = [*selection.slots, *(_Slot(question, None) for question in fresh)]
        groups, verdicts = self._graded_rollouts(slots, step, clock)
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
            replay_ages=[step - slot.stored.step for slot in slots if slot.stored],
            num_scored=selection.num_scored,
            num_padded=selection.num_padded,
            num_discarded=num_discarded,
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

    def _questions(self, step: int, mixed: bool) -> tuple[list[str], list[Question], int]:
        """Ids drawn from experience, the new questions that fill the batch up, and how many new ones are discarded."""
        config, experience = self.config, self.parts.experience
        wanted = config.grpo.num_prompts_per_step
        share = num_replayed(config.experience.replay_ratio, wanted, experience.num_questions) if mixed else 0
        drawn = experience.draw(share, _generator(config.grpo.seed, step, "draw")) if share else []
        exclude = frozenset() if config.experience.allow_duplicates else frozenset(drawn)
        fresh = self.parts.order.take(wanted - len(drawn), exclude)
        discard = config.experience.unused_fresh == "discard"
        num_discarded = self.parts.order.discard(len(drawn)) if discard else 0
        return drawn, fresh, num_discarded

    def _select_answers(self, drawn: list[str], step: int) -> _Selection:
        """For each drawn question the stored answer to replay; only the drawn questions' answers are scored."""
        candidates = [self._stored_answers(question_id) for question_id in drawn]
        choice = self.config.experience.answer_choice
        assert choice is not None
        pairs = [
            (self.questions[question_id].prompt_ids, answer.token_ids)
            for question_id, answers in zip(drawn, candidates, strict=True)
            if needs_scoring(choice, len(answers))
            for answer, _ in answers
        ]
        scores = iter(self._score(pairs))
        rng = _generator(self.config.grpo.seed, step, "answer")
        slots, num_padded = [], 0
        for question_id, answers in zip(drawn, candidates, strict=True):
            scored = [next(scores) if needs_scoring(choice, len(answers)) else None for _ in answers]
            answer, padded = answers[choose_answer(choice, scored, rng)]
            slots.append(_Slot(self.questions[question_id], answer))
            num_padded += padded
        return _Selection(slots, len(pairs), num_padded)

    def _stored_answers(self, question_id: str) -> list[tuple[StoredAnswer, int]]:
        """The question's answers as they would be replayed, each with its number of made-up log-probs."""
        answers = self.parts.experience.answers(question_id)
        if self.config.experience.stored_answer == "tokens":
            return [(answer, 0) for answer in answers]
        tokenizer = self.parts.tokenizer
        decode = partial(tokenizer.decode, special_tokens=True)
        return [
            as_text_answer(answer, decode, tokenizer.encode, tokenizer.eos_text, tokenizer.eos_id) for answer in answers
        ]

    def _score(self, pairs: list[tuple[TokenIds, TokenIds]]) -> list[Any]:
        """Scores under the current policy, each rank scoring its share; in the order of `pairs`."""
        comm = self.parts.comm
        share = balanced_shares([len(prompt) + len(response) for prompt, response in pairs], comm.size)[comm.rank]
        scored = self.parts.policy.score([pairs[i] for i in share], self.parts.sampling.temperature)
        return _in_order(all_gather_concat(comm, list(zip(share, scored, strict=True))))

    def _graded_rollouts(self, slots: list[_Slot], step: int, clock: StepClock) -> tuple[list[Group], list[Verdict]]:
        """Every slot's group with rewards and old log-probs; each rank samples, grades and scores its share."""
        comm = self.parts.comm
        mine = list(range(comm.rank, len(slots), comm.size))
        with clock.phase("rollout"):
            groups = comm.agreed(self._sample([slots[i] for i in mine], step))
        with clock.phase("reward"):
            groups, verdicts = self._grade(groups)
        if self.config.loss_fn.old_logprobs == "recomputed":
            with clock.phase("old_logprobs"):
                groups = self._recomputed_logprobs(groups)
        everyone = _in_order(all_gather_concat(comm, list(zip(mine, zip(groups, verdicts, strict=True), strict=True))))
        return [group for group, _ in everyone], [verdict for _, listed in everyone for verdict in listed]

    def _sample(self, slots: list[_Slot], step: int) -> list[Group]:
        """K new answers for a new question, K-1 and the stored one for a replayed question."""
        members = self.config.grpo.num_generations_per_prompt
        requests = [
            SampleRequest(
                slot.question.prompt_ids,
                tuple(
                    stable_seed(self.config.grpo.seed, step, slot.question.id, slot.stored is not None, index)
                    for index in range(members - (slot.stored is not None))
                ),
            )
            for slot in slots
        ]
        sampled = self.parts.engine.sample(requests, self.parts.sampling)
        return [
            Group(
                slot.question,
                (
                    *(
                        Trajectory(new.token_ids, new.logprobs, 0.0, False, new.stop_reason, new.policy_version)
                        for new in responses
                    ),
                    *_replayed_member(slot.stored),
                ),
            )
            for slot, responses in zip(slots, sampled, strict=True)
        ]

    def _grade(self, groups: list[Group]) -> tuple[list[Group], list[list[Verdict]]]:
        """The groups with rewards, and the verdicts of their new answers."""
        items = [
            (self.parts.tokenizer.decode(member.token_ids), group.question.answer)
            for group in groups
            for member in group.trajectories
        ]
        verdicts = iter(self.parts.verifier.grade(items))
        graded, new_verdicts = [], []
        for group in groups:
            own = [next(verdicts) for _ in group.trajectories]
            members = zip(group.trajectories, own, strict=True)
            rewarded = tuple(replace(member, reward=verdict.reward) for member, verdict in members)
            graded.append(Group(group.question, rewarded))
            pairs = zip(group.trajectories, own, strict=True)
            new_verdicts.append([verdict for member, verdict in pairs if not member.replayed])
        return graded, new_verdicts

    def _recomputed_logprobs(self, groups: list[Group]) -> list[Group]:
        """New answers' log-probs recomputed by the policy before the update; replayed ones keep the recorded."""
        pairs = [
            (group.question.prompt_ids, member.token_ids)
            for group in groups
            for member in group.trajectories
            if not member.replayed
        ]
        scored = iter(self.parts.policy.score(pairs, self.parts.sampling.temperature))
        return [
            Group(
                group.question,
                tuple(
                    member if member.replayed else replace(member, logprobs=next(scored).logprobs)
                    for member in group.trajectories
                ),
            )
            for group in groups
        ]

    def _update(self, groups: list[Group], step: int, mixed: bool) -> list[UpdateResult]:
        """One optimiser step a minibatch of whole groups; each rank trains a token-balanced share."""
        config, comm = self.config, self.parts.comm
        per_micro_batch = config.loss_fn.entropy_bonus == "per_micro_batch"
        results = []
        rng = _generator(config.grpo.seed, step, "minibatches")
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
        report = self.parts.experience.record(groups, step=step, collect=self.schedule.collecting)
        self.schedule.observe(pass_rate(groups))
        if self.config.experience.retire_from == "replay":
            return report, []
        reserve = self.config.grpo.num_prompts_per_step + QUESTIONS_BEYOND_A_BATCH
        return report, self.parts.order.remove(report.retired, reserve)


def _replayed_member(stored: StoredAnswer | None) -> tuple[Trajectory, ...]:
    if stored is None:
        return ()
    return (Trajectory(stored.token_ids, stored.logprobs, 0.0, True, "stop", stored.policy_version),)


def _in_order(indexed: list[tuple[int, Any]]) -> list[Any]:
    return [value for _, value in sorted(indexed, key=lambda pair: pair[0])]


def _generator(run_seed: int, step: int, name: str) -> np.random.Generator:
    return np.random.default_rng(stable_seed(run_seed, step, name))
