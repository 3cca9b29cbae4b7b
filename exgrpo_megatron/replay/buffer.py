"""A buffer of correct answers for a loop of one's own, over the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import Eviction
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.selection import choose_answer, within
from exgrpo_megatron.replay import state_files
from exgrpo_megatron.replay.difficulty import DifficultyBucketer
from exgrpo_megatron.replay.settings import check_settings, section_of
from exgrpo_megatron.replay.strategies import DEFAULT_RANGE, Strategy, rule_of
from exgrpo_megatron.replay.trajectories import NO_PROMPT, ReplayedTrajectory, as_groups
from exgrpo_megatron.types import Group, ScoredSequence, TokenIds

Scorer = Callable[[Sequence[ReplayedTrajectory]], Sequence[ScoredSequence]]
"""Log-probs and entropies (nats) of the response tokens of each trajectory, under the policy as it is now."""


@dataclass(frozen=True)
class AddReport:
    """What became of the trajectories of one `add`."""

    stored: int
    wrong: int
    """Not correct (reward 0 or below): attempts of their questions, and not stored."""
    duplicates: int
    """Correct, with token ids that are stored for their question already; the first log-probs stay."""
    replayed: int
    """Marked as replayed: no attempts, and stored already."""
    evicted: int
    """Answers that went because there were more than `max_size` or `max_per_question`."""


class TrajectoryBuffer:
    """Correct answers with their recorded log-probs, by question, and what is known of every question attempted.

    `len(buffer)` is the number of answers stored. The trainer's buffer is what it is made of
    (`experience.buffer.ExperienceBuffer`, docs/experience.md): compressed records, in memory or in `folder`.
    """

    def __init__(
        self,
        max_size: int = 100_000,
        difficulty_tiers: int = 5,
        entropy_percentiles: Sequence[float] = (25, 50, 75),
        *,
        bucketer: DifficultyBucketer | None = None,
        max_per_question: int | None = None,
        eviction: Eviction = "oldest",
        folder: Path | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            max_size: answers stored at most; beyond it answers go by `eviction`.
            difficulty_tiers: tiers that questions are put in by their rate, 1 (hardest) to this. `sample` weighs those
                in the middle of the tiers most: a normal of width one tier.
            entropy_percentiles: those that `sample` can be asked for, between 0 and 100; none: it cannot.
            bucketer: rates the questions; None: `DifficultyBucketer()`. Its own attempts are not taken over.
            max_per_question: answers of one question at most; None: any.
            eviction: `oldest`, `highest_entropy` (as recorded) or `least_recently_replayed`.
            folder: where answers lie on disk; None: in memory. Files left there by a process that died are deleted.
            seed: of every draw.

        Raises:
            ValueError: an argument is out of range; names it.
        """
        check_settings(max_size, difficulty_tiers, entropy_percentiles, max_per_question, eviction)
        rule = bucketer or DifficultyBucketer()
        self._settings: dict[str, Any] = {
            "max_size": max_size,
            "difficulty_tiers": difficulty_tiers,
            "entropy_percentiles": sorted(map(float, entropy_percentiles)),
            "metric": rule.metric,
            "window_size": rule.window_size,
            "max_per_question": max_per_question,
            "eviction": eviction,
        }
        self._folder = folder
        self._rule = DifficultyBucketer(rule.metric, rule.window_size)
        self._rng = np.random.default_rng(seed)
        self._section = section_of(self._settings)
        self._begin()

    def __len__(self) -> int:
        return self._experience.num_answers

    @property
    def num_questions(self) -> int:
        """With an answer stored."""
        return self._experience.num_questions

    @property
    def difficulty(self) -> DifficultyBucketer:
        """What is known of the questions; to be read."""
        return self._rule._of(self._experience.stats)

    def tier_sizes(self) -> list[int]:
        """Stored questions in tiers 1 (hardest) to `difficulty_tiers`."""
        return list(self._experience.bucket_sizes().values())

    def entropy_thresholds(self) -> dict[float, float]:
        """Of each of `entropy_percentiles` the entropy (nats, as recorded) that so many percent of the stored
        questions have an answer at or below; none where nothing is stored."""
        if not self.num_questions:
            return {}
        return {share: self._experience.entropy_limit(share) for share in self._settings["entropy_percentiles"]}

    def add(self, trajectories: Mapping[str, Any] | Group | Iterable[Mapping[str, Any] | Group]) -> AddReport:
        """Take in graded answers: each is an attempt at its question, and the correct ones are stored.

        A dictionary has `question_id` (text), `token_ids` (of the response, the stop token included), `logprobs` (one
        recorded log-prob a token, under the policy that wrote it) and `reward` (above 0: correct); it may have
        `prompt_ids` (the same for all of a question), `policy_version` (0) and `replayed` (False; True: the answer came
        out of the buffer and is no new attempt). Rows may be lists, arrays or tensors.

        Raises:
            ValueError: one is not what it must be, such as a log-prob that is missing or not finite. Its place,
                question and key are named, and nothing is taken in.
        """
        groups = as_groups(trajectories)
        for group in groups:
            self._check_prompt(group)
        self._step += 1
        report = self._experience.record(groups, step=self._step, collect=True)
        self._prompts |= {group.question.id: group.question.prompt_ids for group in groups if _has_prompt(group)}
        self._forget_prompts()
        members = [member for group in groups for member in group.trajectories]
        return AddReport(
            stored=report.stored,
            wrong=sum(not member.correct and not member.replayed for member in members),
            duplicates=report.duplicates,
            replayed=sum(member.replayed for member in members),
            evicted=report.evicted_of_answers + report.evicted_of_question,
        )

    def sample(
        self,
        strategy: Strategy = "medium_difficulty_low_entropy",
        *,
        size: int,
        difficulty_range: tuple[float, float] | None = None,
        entropy_percentile: float | None = None,
        exclude: Collection[str] = frozenset(),
        score: Scorer | None = None,
    ) -> list[ReplayedTrajectory]:
        """Answers of `size` different questions, or of all there are to choose from, in random order.

        Args:
            strategy: which questions, and which of a question's answers:

                | strategy | questions | answer |
                |---|---|---|
                | `medium_difficulty_low_entropy` | in the range, within the percentile; middle tiers first | lowest |
                | `medium_difficulty` | in the range; middle tiers first | any |
                | `low_entropy` | within the percentile | lowest |
                | `uniform` | all | any |
            size: number of answers.
            difficulty_range: lowest and highest rate of a question, both included; (0.3, 0.7) if not given.
            entropy_percentile: leaves those of the questions whose lowest entropy of an answer is among the lowest so
                many percent of all, and of their answers those within that limit; one of `entropy_percentiles`, the
                smallest if not given.
            exclude: questions not to be drawn.
            score: with it the lowest is that of mean token entropy under the policy as it is now (arXiv:2510.02245);
                it is asked once, about all answers to choose from of questions that have several. Without: of the
                entropy as recorded.

        Raises:
            ValueError: an argument is out of range, or has no effect on the strategy.
        """
        rule = rule_of(strategy, difficulty_range, entropy_percentile, scored=score is not None)
        if size < 1:
            raise ValueError(f"size = {size}: must be at least 1")
        percentile = self._percentile(entropy_percentile) if rule.low_entropy else None
        limits = {
            "bucket_weight": rule.weight,
            "difficulty_range": (difficulty_range or DEFAULT_RANGE) if rule.in_range else None,
            "entropy_percentile": percentile,
        }
        drawn = self._experience.draw(size, self._rng, exclude, by=self._section.model_copy(update=limits))
        if not drawn:
            return []
        chosen = self._choose(self._choices(drawn, percentile), score, lowest=rule.low_entropy)
        return self._read(chosen, replayed_in=self._step)

    def clear(self) -> None:
        """Forget every answer, and all that is known of questions."""
        self._experience.close()
        self._begin()

    def close(self) -> None:
        """Delete what lies in `folder`; the buffer cannot be used any more."""
        self._experience.close()

    def save(self, folder: str | Path) -> None:
        """Write everything, the state of the draws included, into `folder`, which must be new or empty.

        Raises:
            FileExistsError: there is something in it.
        """
        state = state_files.State(self._settings, self._rng.bit_generator.state, self._step, self._prompts)
        state_files.write(Path(folder), state, self._experience)

    @classmethod
    def load(cls, folder: str | Path, *, store: Path | None = None) -> TrajectoryBuffer:
        """The buffer that was saved, with the same future draws; `store`: its `folder`.

        Raises:
            CheckpointError: a file is missing or damaged; names it.
        """
        folder = Path(folder)
        state = state_files.read(folder)
        try:
            settings = dict(state.settings)
            bucketer = DifficultyBucketer(settings.pop("metric"), settings.pop("window_size"))
            buffer = cls(**settings, bucketer=bucketer, folder=store)
            buffer._rng.bit_generator.state = state.generator
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointError(
                f"{folder}: its settings are none of a buffer ({error}); use an unchanged copy"
            ) from error
        buffer._experience.load(folder / state_files.EXPERIENCE)
        buffer._step, buffer._prompts = state.step, state.prompts
        return buffer

    def _begin(self) -> None:
        tiers = self._settings["difficulty_tiers"]
        self._experience = ExperienceBuffer(self._section, tiers + 1, SingleProcess(), self._folder)
        self._prompts: dict[str, TokenIds] = {}
        self._step = 0

    def _check_prompt(self, group: Group) -> None:
        known = self._prompts.get(group.question.id)
        if known is not None and _has_prompt(group) and not np.array_equal(known, group.question.prompt_ids):
            raise ValueError(f"question {group.question.id!r}: prompt_ids differ from those it was added with before")

    def _forget_prompts(self) -> None:
        """Of questions that are not stored, once they are as many as the others."""
        if len(self._prompts) > 2 * self.num_questions + 1000:
            stored = {name for name, _ in self._experience.questions()}
            self._prompts = {name: prompt for name, prompt in self._prompts.items() if name in stored}

    def _percentile(self, asked: float | None) -> float:
        known = self._settings["entropy_percentiles"]
        if not known:
            raise ValueError("entropy_percentiles is empty: the buffer keeps no entropies of questions to go by")
        if asked is not None and asked not in known:
            raise ValueError(f"entropy_percentile = {asked}: must be one of entropy_percentiles = {known}")
        return known[0] if asked is None else float(asked)

    def _choices(self, names: Sequence[str], percentile: float | None) -> dict[str, list[int]]:
        """Of each question the answers that may be taken, the lowest entropy as recorded first."""
        limit = float("inf") if percentile is None else self._experience.entropy_limit(percentile)
        found = zip(names, self._experience.entropies(names), strict=True)
        return {name: sorted(within(values, limit), key=values.__getitem__) for name, values in found}

    def _choose(
        self, choices: Mapping[str, Sequence[int]], score: Scorer | None, *, lowest: bool
    ) -> list[tuple[str, int]]:
        if not lowest:
            return [
                (name, found[choose_answer("random", [None] * len(found), self._rng)])
                for name, found in choices.items()
            ]
        if score is None:
            return [(name, found[0]) for name, found in choices.items()]
        asked = [(name, place) for name, found in choices.items() if len(found) > 1 for place in found]
        scores = dict(zip(asked, score(self._read(asked)) if asked else (), strict=True))
        return [
            (name, found[choose_answer("lowest_mean_entropy", [scores.get((name, i)) for i in found], self._rng)])
            for name, found in choices.items()
        ]

    def _read(self, chosen: Sequence[tuple[str, int]], replayed_in: int | None = None) -> list[ReplayedTrajectory]:
        rates = self._experience.rates([name for name, _ in chosen])
        answers = self._experience.fetch(chosen, replayed_in=replayed_in)
        return [
            ReplayedTrajectory(
                question_id=name,
                prompt_ids=self._prompts.get(name),
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                policy_version=answer.policy_version,
                step=answer.step,
                correctness_rate=float(rate),
                entropy=-float(np.mean(answer.logprobs, dtype=np.float64)),
            )
            for (name, _), answer, rate in zip(chosen, answers, rates, strict=True)
        ]


def _has_prompt(group: Group) -> bool:
    return len(group.question.prompt_ids) > len(NO_PROMPT)
