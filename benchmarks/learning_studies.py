"""Trainers that change the replay step in ways for which there is no recipe key: to measure whether there should be."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from exgrpo_megatron.algorithm.batch import minibatches, objective, train_sequences
from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.parts import Parts, Verifier, update_shared
from exgrpo_megatron.replay_control import StepPlan
from exgrpo_megatron.replay_draw import Drawn, ReplayDraw, Selection
from exgrpo_megatron.replay_step import ReplayStep
from exgrpo_megatron.replay_step_metrics import ReplayStepRecord
from exgrpo_megatron.rewards.rules import boxed_answer
from exgrpo_megatron.rewards.verifier import Graded, Verdict
from exgrpo_megatron.trainer import StepResult, Trainer
from exgrpo_megatron.types import Group, Question, Slot, StoredAnswer, TokenIds, TrainSequence, Trajectory, UpdateResult


@dataclass(frozen=True)
class Study:
    """What is changed; one process only."""

    unsolved_share: float = 0.0
    """Share of a step's questions drawn from those that were attempted and have no stored answer."""
    entropy_of_unsolved: bool = False
    """The entropy bonus is for answers of questions without a stored answer only."""
    wrong_cap: float = 0.0
    """Above 0: as many stored wrong answers join a replay step, of questions with a stored right one, each with the
    advantage -min(running pass rate, this)."""
    max_age: int | None = None
    """Stored answers older than so many steps are not trained on."""
    stored_share: float | None = None
    """A replay step has this share of the stored questions."""
    luck: float = 0.0
    """In training this share of the wrong answers whose last digit is right counts as right: always the same ones."""
    confirmed: Literal["any", "most", "twice"] = "any"
    """The stored answer that was found most often, or only those found twice at least."""


class StudyTrainer(Trainer):
    """The trainer with the changes of a study."""

    def __init__(self, parts: Parts, study: Study) -> None:
        if study.luck:
            parts = replace(parts, verifier=LuckyVerifier(parts.verifier, study.luck))
        super().__init__(parts)
        self.study, self.found, self.wrong = study, Found(), Wrong()
        self.replay = StudyDraw(parts, study, self.found)
        self.replay_step = StudyReplayStep(parts, self.replay, study, self.wrong)

    def step(self) -> StepResult:
        """One step, whose groups are remembered until `noted`."""
        result = super().step()
        self.found.last_groups.append(result.groups)
        return result

    def _update(
        self, groups: list[Group], off_policy: list[Group], stored: list[TrainSequence], step: int, plan: StepPlan
    ) -> tuple[list[UpdateResult], int]:
        self.found.observe(groups)
        self.wrong.observe(groups)
        if not self.study.entropy_of_unsolved:
            return super()._update(groups, off_policy, stored, step, plan)
        rng = generator(self.config.grpo.seed, step, "minibatches")
        (part,) = minibatches(groups, 1, rng)
        members = [(group.question, member) for group in part for member in group.trajectories]
        sequences = [
            replace(sequence, entropy_weight=0.0) if self.parts.experience.count(question.id) else sequence
            for (question, _), sequence in zip(members, train_sequences(part, self.config, data_parallel_size=1),
                                               strict=True)
        ]  # fmt: skip
        return [update_shared(self.parts, sequences, objective(self.config, mixed=False))], 0

    def noted(self) -> dict[str, float]:
        """Shares of lucky answers: right by the training reward, with a wrong working, since the last call; and the
        share of training questions without a stored answer."""
        experience, decode = self.parts.experience, self.parts.tokenizer.decode

        def lucky(pairs: Sequence[tuple[Question, TokenIds]]) -> float:
            wrong = sum(boxed_answer(decode(tokens)) != question.answer for question, tokens in pairs)
            return wrong / len(pairs) if pairs else 0.0

        listed = [(self.questions[name], a.token_ids) for name, found in experience.own_answers() for a in found]
        new = [
            (group.question, member.token_ids)
            for groups in self.found.last_groups
            for group in groups
            for member in group.trajectories
            if member.reward > 0
        ]
        trained = [(slot.question, slot.stored.token_ids) for slot in self.found.trained if slot.stored]
        self.found.last_groups, self.found.trained = [], []
        shares = {"lucky_new": lucky(new)}
        if self.config.experience.enabled:
            shares |= {"lucky_stored": lucky(listed), "lucky_trained": lucky(trained)}
            shares["unsolved"] = 1 - experience.num_questions / len(self.questions)
        return shares


class LuckyVerifier:
    """A verifier for which some wrong answers are right, if they have as many digits and the last one is right."""

    def __init__(self, strict: Verifier, share: float) -> None:
        self._strict, self._share = strict, share

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """The same answer to the same question always earns the same."""
        return [
            Verdict(1.0, "correct") if self._is_lucky(item[0], item[1]) else verdict
            for item, verdict in zip(items, self._strict.grade(items), strict=True)
        ]

    def _is_lucky(self, response: str, gold: str) -> bool:
        answer = boxed_answer(response) or ""
        alike = answer.isdigit() and len(answer) == len(gold) and answer[-1] == gold[-1]
        return alike and zlib.crc32(f"{response} {gold}".encode()) < self._share * 2**32

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        """As the strict one."""
        return self._strict.check_gold(answers)

    def close(self) -> None:
        """The strict one is closed by whoever made it."""


class Found:
    """How often each right answer was found, and what was trained on."""

    def __init__(self) -> None:
        self.times: Counter[tuple[str, bytes]] = Counter()
        self.last_groups: list[list[Group]] = []
        self.trained: list[Slot] = []

    def observe(self, groups: Sequence[Group]) -> None:
        """Count new right answers."""
        for group in groups:
            self.times.update(
                (group.question.id, member.token_ids.tobytes()) for member in group.trajectories if member.reward > 0
            )


class Wrong:
    """The 16 newest wrong answers of every question."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Trajectory]] = {}

    def observe(self, groups: Sequence[Group]) -> None:
        """Remember the new ones."""
        for group in groups:
            new = [member for member in group.trajectories if member.reward <= 0]
            self.answers[group.question.id] = [*self.answers.get(group.question.id, []), *new][-16:]


class StudyDraw(ReplayDraw):
    """New questions and stored answers, chosen otherwise."""

    def __init__(self, parts: Parts, study: Study, found: Found) -> None:
        super().__init__(parts)
        self.study, self.found = study, found

    def draw(self, step: int, *, mixed: bool) -> Drawn:
        """`unsolved_share` of the questions from those that are unsolved."""
        assert not mixed, "a study has no stored answers in groups"
        experience, count = self.parts.experience, self.config.grpo.num_prompts_per_step
        unsolved = [name for name in self.questions if experience.stats.attempts(name) and not experience.count(name)]
        size = min(int(self.study.unsolved_share * count), len(unsolved))
        rng = generator(self.config.grpo.seed, step, "unsolved")
        names = [unsolved[i] for i in rng.choice(len(unsolved), size, replace=False)] if size else []
        fresh = self.parts.order.take(count - size, frozenset(names))
        return Drawn([], [*(self.questions[name] for name in names), *fresh], 0, 0)

    def choose(self, drawn: Sequence[str], choice: AnswerChoice, step: int, purpose: str) -> Selection:
        """Without answers that are too old or were not confirmed."""
        if self.study.confirmed == "any" and self.study.max_age is None:
            return self._noted(super().choose(drawn, choice, step, purpose))
        rng = generator(self.config.grpo.seed, step, purpose)
        slots = []
        for name in drawn:
            answers = [a for a in self.parts.experience.answers(name) if self._is_young(a, step)]
            times = [self.found.times[name, answer.token_ids.tobytes()] for answer in answers]
            least = {"any": 0, "twice": 2, "most": max(times, default=0)}[self.study.confirmed]
            left = [answer for answer, count in zip(answers, times, strict=True) if count >= least]
            if left:
                slots.append(Slot(self.questions[name], left[int(rng.integers(len(left)))]))
        return self._noted(Selection(slots, 0, 0))

    def _is_young(self, answer: StoredAnswer, step: int) -> bool:
        return self.study.max_age is None or step - answer.step <= self.study.max_age

    def _noted(self, selection: Selection) -> Selection:
        self.found.trained += selection.slots
        return selection


class StudyReplayStep(ReplayStep):
    """Replay steps of another size, or with wrong answers in them."""

    def __init__(self, parts: Parts, replay: ReplayDraw, study: Study, wrong: Wrong) -> None:
        super().__init__(parts, replay)
        self.study, self.wrong = study, wrong

    def run(self, step: int, *, on: bool, cap: float | None) -> ReplayStepRecord:
        """A replay step of `stored_share` of the stored questions."""
        if self.study.stored_share is None:
            return super().run(step, on=on, cap=cap)
        wanted = max(1, round(self.study.stored_share * self.parts.experience.num_questions))
        members = self.config.grpo.num_prompts_per_step * self.config.grpo.num_generations_per_prompt
        keys = self.config.experience.replay_step.model_copy(update={"size": wanted / members + 1e-9})
        before = self.config
        self.config = before.model_copy(update={"experience": before.experience.model_copy(
            update={"replay_step": keys})})  # fmt: skip
        try:
            return super().run(step, on=on, cap=cap)
        finally:
            self.config = before

    def _draw(self, step: int, number: int, record: ReplayStepRecord) -> list[TrainSequence]:
        sequences = super()._draw(step, number, record)
        return [*sequences, *self._wrong(step, len(sequences))] if self.study.wrong_cap else sequences

    def _wrong(self, step: int, count: int) -> list[TrainSequence]:
        """At most `count` stored wrong answers."""
        experience = self.parts.experience
        names = [name for name, _ in experience.questions() if self.wrong.answers.get(name)]
        rng = generator(self.config.grpo.seed, step, "wrong answers")
        sequences = []
        for i in rng.choice(len(names), min(count, len(names)), replace=False) if names else ():
            listed = self.wrong.answers[names[i]]
            answer: Trajectory = listed[int(rng.integers(len(listed)))]
            sequences.append(
                TrainSequence(
                    prompt_ids=self.replay.questions[names[i]].prompt_ids,
                    response_ids=answer.token_ids,
                    old_logprobs=answer.logprobs,
                    advantage=-min(experience.running_pass_rate(names[i]), self.study.wrong_cap),
                    replayed=True,
                    policy_weight=1.0 / (self.config.policy.generation.max_new_tokens * max(1, count)),
                    entropy_weight=0.0,
                )
            )
        return sequences
