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
from exgrpo_megatron.comm import all_gather_concat, in_order
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.experience.selection import choose_answer, needs_scoring
from exgrpo_megatron.experience.text_form import as_text_answer, as_text_tokens
from exgrpo_megatron.parts import Parts, score_shared
from exgrpo_megatron.rewards.alarm import RewardAlarm
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.rollout.protocol import SampledResponse, SampleRequest
from exgrpo_megatron.rollout.sharing import sample_share
from exgrpo_megatron.step_metrics import StepClock, StepRecord, pass_rate, step_metrics, step_warnings
from exgrpo_megatron.types import Group, Question, ScoredSequence, StoredAnswer, Trajectory, UpdateResult

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
        tokenizer = parts.tokenizer
        decode = partial(tokenizer.decode, special_tokens=True)
        self._text_form = (decode, tokenizer.encode, tokenizer.eos_text, tokenizer.eos_id)
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
        drawn = experience.intact(experience.draw(share, _generator(config.grpo.seed, step, "draw"))) if share else []
        exclude = frozenset() if config.experience.allow_duplicates else frozenset(drawn)
        fresh = self.parts.order.take(wanted - len(drawn), exclude)
        discard = config.experience.unused_fresh == "discard"
        num_discarded = self.parts.order.discard(len(drawn)) if discard else 0
        return drawn, fresh, num_discarded

    def _select_answers(self, drawn: list[str], step: int) -> _Selection:
        """For each drawn question the stored answer to replay; only the drawn questions' answers are scored."""
        experience, choice = self.parts.experience, self.config.experience.answer_choice
        assert choice is not None
        scored = self._scored_candidates([name for name in drawn if needs_scoring(choice, experience.count(name))])
        rng = _generator(self.config.grpo.seed, step, "answer")
        chosen = [
            (name, choose_answer(choice, scored.get(name, [None] * experience.count(name)), rng)) for name in drawn
        ]
        replayed = [self._as_replayed(answer) for answer in experience.fetch(chosen, replayed_in=step)]
        slots = [_Slot(self.questions[name], answer) for name, (answer, _) in zip(drawn, replayed, strict=True)]
        return _Selection(slots, sum(map(len, scored.values())), sum(padded for _, padded in replayed))

    def _scored_candidates(self, question_ids: list[str]) -> dict[str, list[ScoredSequence]]:
        """Question id -> scores of all its stored answers, in the form in which they would be replayed."""
        as_text = self.config.experience.stored_answer == "text"
        pairs = [
            (name, as_text_tokens(token_ids, *self._text_form) if as_text else token_ids)
            for name, listed in zip(question_ids, self.parts.experience.token_ids(question_ids), strict=True)
            for token_ids in listed
        ]
        scores = score_shared(self.parts, [(self.questions[name].prompt_ids, token_ids) for name, token_ids in pairs])
        scored: dict[str, list[ScoredSequence]] = {name: [] for name in question_ids}
        for (name, _), score in zip(pairs, scores, strict=True):
            scored[name].append(score)
        return scored

    def _as_replayed(self, answer: StoredAnswer) -> tuple[StoredAnswer, int]:
        """The answer as it is replayed, and its number of made-up log-probs."""
        if self.config.experience.stored_answer == "tokens":
            return answer, 0
        return as_text_answer(answer, *self._text_form)

    def _graded_rollouts(self, slots: list[_Slot], step: int, clock: StepClock) -> tuple[list[Group], list[Verdict]]:
        """Every slot's group with rewards and old log-probs; each process samples and grades its part of the share that
        its data-parallel rank scores."""
        comm = self.parts.comm
        mine = list(range(comm.rank, len(slots), comm.size))
        with clock.phase("rollout"):
            sampled = self._sample([slots[i] for i in mine], step)
        with clock.phase("reward"):
            graded = list(zip(sampled, self._grade(list(sampled.values())), strict=True))
        share = in_order(pair for part in comm.gather_members(graded) for pair in part)
        groups, verdicts = [group for group, _ in share], [listed for _, listed in share]
        if self.config.loss_fn.old_logprobs == "recomputed":
            with clock.phase("old_logprobs"):
                groups = self._recomputed_logprobs(groups)
        everyone = in_order(all_gather_concat(comm, list(zip(mine, zip(groups, verdicts, strict=True), strict=True))))
        return [group for group, _ in everyone], [verdict for _, listed in everyone for verdict in listed]

    def _sample(self, slots: list[_Slot], step: int) -> dict[int, Group]:
        """By index the groups of this process's part of the slots: K new answers for a new question, K-1 and the stored
        one for a replayed question."""
        requests = [self._request(slot, step) for slot in slots]
        sampled = sample_share(self.parts.engine, requests, self.parts.sampling, self.parts.comm)
        return {index: _group(slots[index], responses) for index, responses in sampled.items()}

    def _request(self, slot: _Slot, step: int) -> SampleRequest:
        replayed = slot.stored is not None
        seeds = (
            stable_seed(self.config.grpo.seed, step, slot.question.id, replayed, index)
            for index in range(self.config.grpo.num_generations_per_prompt - replayed)
        )
        return SampleRequest(slot.question.prompt_ids, tuple(seeds))

    def _grade(self, groups: list[Group]) -> list[tuple[Group, list[Verdict]]]:
        """The groups with rewards, each with the verdicts of its new answers."""
        items = [
            (self.parts.tokenizer.decode(member.token_ids), group.question.answer)
            for group in groups
            for member in group.trajectories
        ]
        verdicts = iter(self.parts.verifier.grade(items))
        graded = []
        for group in groups:
            pairs = [(member, next(verdicts)) for member in group.trajectories]
            rewarded = tuple(replace(member, reward=verdict.reward) for member, verdict in pairs)
            graded.append(
                (Group(group.question, rewarded), [verdict for member, verdict in pairs if not member.replayed])
            )
        return graded

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
                    member
                    if member.replayed
                    else replace(member, logprobs=next(scored).logprobs, engine_logprobs=member.logprobs)
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
        report = self.parts.experience.record(
            groups, step=step, collect=self.schedule.collecting, truncated=not self.config.grpo.overlong_filtering
        )
        self.schedule.observe(pass_rate(groups))
        if self.config.experience.retire_from == "replay":
            return report, []
        reserve = self.config.grpo.num_prompts_per_step + QUESTIONS_BEYOND_A_BATCH
        return report, self.parts.order.remove(report.retired, reserve)


def _group(slot: _Slot, responses: list[SampledResponse]) -> Group:
    new = (
        Trajectory(response.token_ids, response.logprobs, 0.0, False, response.stop_reason, response.policy_version)
        for response in responses
    )
    return Group(slot.question, (*new, *_replayed_member(slot.stored)))


def _replayed_member(stored: StoredAnswer | None) -> tuple[Trajectory, ...]:
    if stored is None:
        return ()
    return (Trajectory(stored.token_ids, stored.logprobs, 0.0, True, "stop", stored.policy_version),)


def _generator(run_seed: int, step: int, name: str) -> np.random.Generator:
    return np.random.default_rng(stable_seed(run_seed, step, name))
