"""The experience buffer E and the retired set S of Algorithm 1 (arXiv:2510.02245)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.answers import AnswerStore, answer_fault
from exgrpo_megatron.experience.buckets import bucket_counts
from exgrpo_megatron.experience.files import (
    ANSWERS_FILE,
    SUMMARY_FILE,
    Row,
    Summary,
    read_answers,
    read_summary,
    write_answers,
    write_summary,
)
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.types import Group, StoredAnswer, Trajectory


@dataclass(frozen=True)
class RefusedAnswer:
    """A correct answer that was not stored because it could not have been replayed."""

    question_id: str
    reason: str


@dataclass
class RecordReport:
    """What became of the groups of one step."""

    stored: int = 0
    """New answers stored."""
    duplicates: int = 0
    """Correct answers whose token ids were stored already."""
    not_collected: int = 0
    """Correct answers left out because nothing is collected yet."""
    unsolved: int = 0
    """Groups without a correct answer: nothing changes for their questions."""
    already_retired: int = 0
    """Groups of questions retired before this step: nothing is stored for them."""
    retired: list[str] = field(default_factory=list)
    """Questions newly retired."""
    refused: list[RefusedAnswer] = field(default_factory=list)


@dataclass
class MergeReport:
    """What was taken from an experience file."""

    questions: int = 0
    """Questions that were not stored before."""
    answers: int = 0
    """Answers added."""
    duplicates: int = 0
    """Answers left out because their token ids were stored already."""
    retired: int = 0
    """Answers left out because their question is retired here."""


class ExperienceBuffer:
    """Correct answers by question, questions by bucket, and the questions that are solved for good.

    The index (question -> bucket, number of answers) decides every draw and is separate from the answers, so that the
    same index on every rank gives the same draw wherever the answers are kept.
    """

    def __init__(self, config: ExperienceConfig, group_size: int) -> None:
        assert config.bucket_weight is not None, "experience.bucket_weight is unresolved"
        self._enabled = config.enabled
        self._bucket_weight = config.bucket_weight
        self._bucket_sigma = config.bucket_sigma
        self._group_size = group_size
        self._index = QuestionIndex(group_size)
        self._answers = AnswerStore()
        self._retired: set[str] = set()

    @property
    def num_questions(self) -> int:
        return len(self._index)

    @property
    def num_answers(self) -> int:
        return self._answers.num_answers

    @property
    def retired(self) -> frozenset[str]:
        return frozenset(self._retired)

    def is_retired(self, question_id: str) -> bool:
        return question_id in self._retired

    def bucket_sizes(self) -> dict[int, int]:
        """Number of stored questions by k, for every k in 1..K-1."""
        return dict(enumerate(self._index.sizes.tolist(), start=1))

    def answers(self, question_id: str) -> tuple[StoredAnswer, ...]:
        """The question's stored answers, oldest first; none where it is not stored."""
        return self._answers.get(question_id)

    def draw(self, n: int, rng: np.random.Generator, exclude: Collection[str] = frozenset()) -> list[str]:
        """Min(n, available) distinct questions to replay: a bucket by its weight, then uniformly within it.

        `exclude`: questions that must not be drawn, such as those already in the batch. Time depends on `n`, not on
        the number of stored questions.
        """
        excluded = self._index.positions(exclude)
        sizes = self._index.sizes - np.array([len(positions) for positions in excluded], dtype=np.int64)
        counts = bucket_counts(self._bucket_weight, n, sizes, self._bucket_sigma, rng)
        drawn = [
            question_id
            for bucket, (count, positions) in enumerate(zip(counts.tolist(), excluded, strict=True), start=1)
            for question_id in self._index.sample(bucket, count, positions, rng)
        ]
        return [drawn[i] for i in rng.permutation(len(drawn))]

    def record(self, groups: list[Group], *, step: int, collect: bool) -> RecordReport:
        """Take in the rewarded groups of a step, in order; `collect`: whether new correct answers are stored.

        With k correct of K: k == K retires the question and forgets its answers; 0 < k < K stores the new correct
        answers and makes k the bucket of the question, if it has stored answers; k == 0 changes nothing. An answer
        without exactly one finite log-prob a token is refused. Does nothing where `experience.enabled` is false.

        Raises:
            ValueError: a group is not of the buffer's group size.
        """
        report = RecordReport()
        for group in groups if self._enabled else []:
            if group.size != self._group_size:
                raise ValueError(f"a group of {group.size} members in a buffer for groups of {self._group_size}")
            self._record_group(group, step, collect, report)
        return report

    def keep_only(self, known: Collection[str]) -> int:
        """Forget stored questions that are not in `known` (a hash set); returns how many were forgotten."""
        unknown = [question_id for question_id, _ in self._index.items() if question_id not in known]
        for question_id in unknown:
            self._forget(question_id)
        return len(unknown)

    def save(self, folder: Path) -> None:
        """Write the two experience files into `folder`, which is made if need be."""
        self.snapshot().save(folder)

    def snapshot(self) -> ExperienceSnapshot:
        """The buffer as it is now, to be saved while it changes. Stored answers never change: they are not copied."""
        summary = Summary(self._group_size, self.num_questions, self.num_answers, tuple(sorted(self._retired)))
        return ExperienceSnapshot(tuple(self._rows()), summary)

    def load(self, folder: Path) -> None:
        """Become the buffer that was saved, with the same future draws; on an error nothing is changed.

        Raises:
            CheckpointError: a file is missing, damaged or disagrees with the other; names the file and the row.
        """
        summary = read_summary(folder / SUMMARY_FILE)
        rows = read_answers(folder / ANSWERS_FILE, self._group_size)
        retired = set(summary.retired)
        _check_agreement(folder, summary, rows, retired)
        self._index, self._answers, self._retired = QuestionIndex(self._group_size), AnswerStore(), retired
        self._add_rows(rows, MergeReport())

    def merge_file(self, path: Path) -> MergeReport:
        """Add the answers of an experience file of another run (the Parquet file, or the folder it is in).

        A question stored here keeps its bucket, one retired here stays away, and the other run's retired questions
        are not taken over. Answers count as stored at step 0: the other run's steps say nothing about their age here.
        On an error nothing is changed.

        Raises:
            CheckpointError: the file is missing, damaged or for another group size; names the file and the row.
        """
        rows = read_answers(path / ANSWERS_FILE if path.is_dir() else path, self._group_size)
        report = MergeReport()
        self._add_rows([replace(row, answer=replace(row.answer, step=0)) for row in rows], report)
        return report

    def _record_group(self, group: Group, step: int, collect: bool, report: RecordReport) -> None:
        question_id, num_correct = group.question.id, group.num_correct
        if question_id in self._retired:
            report.already_retired += 1
        elif num_correct == 0:
            report.unsolved += 1
        elif num_correct == self._group_size:
            self._forget(question_id)
            self._retired.add(question_id)
            report.retired.append(question_id)
        else:
            self._store_correct(group, step, collect, report)
            num_answers = self._answers.count(question_id)
            if num_answers:
                self._index.put(question_id, num_correct, num_answers)

    def _store_correct(self, group: Group, step: int, collect: bool, report: RecordReport) -> None:
        for member in group.trajectories:
            if member.reward > 0 and not member.replayed:
                if collect:
                    self._store(group.question.id, member, step, report)
                else:
                    report.not_collected += 1

    def _store(self, question_id: str, member: Trajectory, step: int, report: RecordReport) -> None:
        fault = answer_fault(member.token_ids, member.logprobs)
        if fault is not None:
            report.refused.append(RefusedAnswer(question_id, fault))
        elif self._answers.add(
            question_id, StoredAnswer(member.token_ids, member.logprobs, member.policy_version, step)
        ):
            report.stored += 1
        else:
            report.duplicates += 1

    def _forget(self, question_id: str) -> None:
        self._answers.remove(question_id)
        if question_id in self._index:
            self._index.remove(question_id)

    def _rows(self) -> Iterator[Row]:
        """In the order of the bucket lists, which is thereby saved."""
        for question_id, bucket in self._index.items():
            for answer_index, answer in enumerate(self._answers.get(question_id)):
                yield Row(question_id, bucket, answer_index, answer)

    def _add_rows(self, rows: list[Row], report: MergeReport) -> None:
        for row in rows:
            if row.question_id in self._retired:
                report.retired += 1
                continue
            known = row.question_id in self._index
            added = self._answers.add(row.question_id, row.answer)
            bucket = self._index.bucket(row.question_id) if known else row.bucket
            self._index.put(row.question_id, bucket, self._answers.count(row.question_id))
            report.questions += not known
            report.answers += added
            report.duplicates += not added


@dataclass(frozen=True)
class ExperienceSnapshot:
    """What a buffer held at one moment."""

    rows: tuple[Row, ...]
    summary: Summary

    def save(self, folder: Path) -> list[Path]:
        """Write the two experience files into `folder`, which is made if need be, and return them; in any thread."""
        folder.mkdir(parents=True, exist_ok=True)
        write_answers(folder / ANSWERS_FILE, self.rows, self.summary.group_size)
        write_summary(folder / SUMMARY_FILE, self.summary)
        return [folder / ANSWERS_FILE, folder / SUMMARY_FILE]


def _check_agreement(folder: Path, summary: Summary, rows: list[Row], retired: set[str]) -> None:
    """The two files must be of the same buffer, and no retired question may have answers."""
    path = folder / ANSWERS_FILE
    found = (len({row.question_id for row in rows}), len(rows))
    if found != (summary.num_questions, summary.num_answers):
        raise CheckpointError(
            f"{path}: it holds {found[0]} questions and {found[1]} answers, but {SUMMARY_FILE} beside it says "
            f"{summary.num_questions} and {summary.num_answers}. Use another checkpoint."
        )
    for number, row in enumerate(rows):
        if row.question_id in retired:
            raise CheckpointError(
                f"{path}: row {number}, question {row.question_id!r}: it is retired according to {SUMMARY_FILE}. "
                "Use another checkpoint."
            )
