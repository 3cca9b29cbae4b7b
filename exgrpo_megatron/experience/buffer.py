"""The experience buffer E and the retired set S of Algorithm 1 (arXiv:2510.02245), spread over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exgrpo_megatron.comm import Communicator, all_gather_union, together
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.answers import AnswerStore
from exgrpo_megatron.experience.buckets import bucket_counts
from exgrpo_megatron.experience.changes import Change, Kept, changes_of
from exgrpo_megatron.experience.files import (
    SUMMARY_FILE,
    ExperienceSnapshot,
    Row,
    Summary,
    answers_file,
    find_answers_files,
    read_summary,
)
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.partition import owner_of, shard_of
from exgrpo_megatron.experience.reading import Listing, read_answers, read_index
from exgrpo_megatron.experience.reports import MergeReport, RecordReport
from exgrpo_megatron.types import Group, StoredAnswer, TokenIds


class ExperienceBuffer:
    """Correct answers by question, questions by bucket, and the questions that are solved for good.

    Every process holds the index (question -> bucket, number of answers) and the retired questions, and changes them
    alike: draws depend on them only, and so not on the number of ranks. The answers of a question are kept by one
    process, the first of the data-parallel rank that owns its shard. Methods marked collective must be called on
    every process with the same arguments.
    """

    def __init__(self, config: ExperienceConfig, group_size: int, comm: Communicator) -> None:
        assert config.bucket_weight is not None, "experience.bucket_weight is unresolved"
        self._enabled = config.enabled
        self._bucket_weight = config.bucket_weight
        self._bucket_sigma = config.bucket_sigma
        self._group_size = group_size
        self._comm = comm
        self._index = QuestionIndex(group_size)
        self._own = AnswerStore()
        self._retired: set[str] = set()

    @property
    def num_questions(self) -> int:
        return len(self._index)

    @property
    def num_answers(self) -> int:
        """Over all ranks."""
        return self._index.total_answers

    @property
    def num_own_answers(self) -> int:
        """Kept by this process."""
        return self._own.num_answers

    @property
    def retired(self) -> frozenset[str]:
        return frozenset(self._retired)

    def is_retired(self, question_id: str) -> bool:
        return question_id in self._retired

    def bucket_sizes(self) -> dict[int, int]:
        """Number of stored questions by k, for every k in 1..K-1."""
        return dict(enumerate(self._index.sizes.tolist(), start=1))

    def count(self, question_id: str) -> int:
        """How many answers are stored for the question; known on every process."""
        return self._index.num_answers(question_id)

    def questions(self) -> Iterator[tuple[str, int]]:
        """Every stored question and its bucket, in the order that decides draws."""
        return self._index.items()

    def own_answers(self) -> Iterator[tuple[str, tuple[StoredAnswer, ...]]]:
        """What this process keeps, by question."""
        return self._own.items()

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

    def token_ids(self, question_ids: Sequence[str]) -> list[list[TokenIds]]:
        """Of each question the token ids of its answers, oldest first, without their log-probs; collective."""
        mine = {name: [answer.token_ids for answer in self._own.get(name)] for name in question_ids if self._owns(name)}
        found = all_gather_union(self._comm, mine)
        return [found[name] for name in question_ids]

    def fetch(self, chosen: Sequence[tuple[str, int]]) -> list[StoredAnswer]:
        """The answers named by (question id, index among its answers, oldest first); collective."""
        mine = {(name, i): self._own.get(name)[i] for name, i in chosen if self._owns(name)}
        found = all_gather_union(self._comm, mine)
        return [found[key] for key in chosen]

    def answers(self, question_id: str) -> tuple[StoredAnswer, ...]:
        """All answers of one question, oldest first; none where it is not stored. Collective."""
        return tuple(self.fetch([(question_id, index) for index in range(self.count(question_id))]))

    def extent(self) -> tuple[int, int]:
        """Tokens of the longest answer and the highest token id of any; (0, -1) where there is none. Collective."""
        mine = [answer.token_ids for _, answers in self._own.items() for answer in answers]
        ends = (max(map(len, mine), default=0), max((int(ids.max()) for ids in mine), default=-1))
        longest, highest = zip(*self._comm.all_gather(ends), strict=True)
        return max(longest), max(highest)

    def record(self, groups: list[Group], *, step: int, collect: bool, truncated: bool = True) -> RecordReport:
        """Take in the rewarded groups of a step, in order; `collect`: whether new correct answers are stored,
        `truncated`: those too that were cut off.

        Collective, with all groups on every process. With k correct of K: k == K retires the question and forgets its
        answers; 0 < k < K stores the new correct answers and makes k the bucket of the question, if it has stored
        answers; k == 0 changes nothing. An answer without exactly one finite log-prob a token is refused. Does nothing
        where `experience.enabled` is false.

        Raises:
            ValueError: a group is not of the buffer's group size.
        """
        if not self._enabled:
            return RecordReport()
        for group in groups:
            if group.size != self._group_size:
                raise ValueError(f"a group of {group.size} members in a buffer for groups of {self._group_size}")
        changes, report = changes_of(groups, self._retired, step=step, collect=collect, truncated=truncated)
        mine = {number: self._keep(change) for number, change in enumerate(changes) if self._owns(change.question_id)}
        kept = all_gather_union(self._comm, mine)
        for number, change in enumerate(changes):
            self._apply(change, kept[number], report)
        return report

    def keep_only(self, known: Collection[str]) -> int:
        """Forget stored questions that are not in `known` (a hash set); returns how many were forgotten."""
        unknown = [question_id for question_id, _ in self._index.items() if question_id not in known]
        for question_id in unknown:
            self._own.remove(question_id)
            self._index.remove(question_id)
        return len(unknown)

    def save(self, folder: Path) -> None:
        """Write this process's answers into `folder`, which is made if need be, and the summary once; collective.

        Raises:
            OSError: on every process, where one cannot write.
        """
        with together(self._comm):
            self.snapshot().save(folder)

    def snapshot(self) -> ExperienceSnapshot:
        """This process's part of the buffer as it is now, to be saved while the buffer changes.

        Stored answers never change: they are not copied.
        """
        comm, summary = self._comm, None
        if comm.is_main:
            retired = tuple(sorted(self._retired))
            summary = Summary(self._group_size, self.num_questions, self.num_answers, retired)
        file = answers_file(comm.rank, comm.size) if comm.member == 0 else None
        return ExperienceSnapshot(self._group_size, file, tuple(self._rows()), summary)

    def load(self, folder: Path) -> None:
        """Become the buffer that was saved, on whatever number of ranks, with the same future draws; collective.

        Raises:
            CheckpointError: a file is missing, damaged or disagrees with another; names the file and the row. It is
                raised on every process, and nothing is changed.
        """
        with together(self._comm):
            summary = read_summary(folder / SUMMARY_FILE)
            files = find_answers_files(folder)
            listings = read_index(files, self._group_size)
            own = read_answers(files, self._group_size, self._owns)
            retired = set(summary.retired)
            _check_agreement(folder, summary, listings, retired)
        self._index, self._own, self._retired = QuestionIndex(self._group_size), own, retired
        for question in listings:
            self._index.put(question.question_id, question.bucket, question.num_answers)

    def merge_file(self, path: Path) -> MergeReport:
        """Add the answers of another run (its experience folder, or the one Parquet file that has them); collective.

        A question stored here keeps its bucket, one retired here stays away, and the other run's retired questions
        are not taken over. Answers count as stored at step 0: the other run's steps say nothing about their age here.

        Raises:
            CheckpointError: a file is missing, damaged or for another group size; names the file and the row. It is
                raised on every process, and nothing is changed.
        """
        with together(self._comm):
            files = find_answers_files(path)
            listings = read_index(files, self._group_size)
            theirs = read_answers(files, self._group_size, self._owns)
        mine = {
            name: self._adopt(name, [replace(answer, step=0) for answer in answers])
            for name, answers in theirs.items()
            if name not in self._retired
        }
        kept = all_gather_union(self._comm, mine)
        report = MergeReport()
        for question in listings:
            self._list(question, kept.get(question.question_id), report)
        return report

    def _owns(self, question_id: str) -> bool:
        comm = self._comm
        return comm.member == 0 and owner_of(shard_of(question_id), comm.size) == comm.rank

    def _keep(self, change: Change) -> Kept:
        if change.solved:
            self._own.remove(change.question_id)
            return Kept(0, 0, 0)
        return self._adopt(change.question_id, change.answers)

    def _adopt(self, question_id: str, answers: Sequence[StoredAnswer]) -> Kept:
        stored = sum(self._own.add(question_id, answer) for answer in answers)
        return Kept(stored, len(answers) - stored, self._own.count(question_id))

    def _apply(self, change: Change, kept: Kept, report: RecordReport) -> None:
        report.stored += kept.stored
        report.duplicates += kept.duplicates
        if change.solved:
            self._retired.add(change.question_id)
            if change.question_id in self._index:
                self._index.remove(change.question_id)
        elif kept.num_answers:
            self._index.put(change.question_id, change.bucket, kept.num_answers)

    def _list(self, question: Listing, kept: Kept | None, report: MergeReport) -> None:
        """Enter a question of a file; `kept` is None where it is retired here."""
        if kept is None:
            report.retired += question.num_answers
            return
        name = question.question_id
        known = name in self._index
        self._index.put(name, self._index.bucket(name) if known else question.bucket, kept.num_answers)
        report.questions += not known
        report.answers += kept.stored
        report.duplicates += kept.duplicates

    def _rows(self) -> Iterator[Row]:
        """Of what this process keeps, shard by shard, so that another number of ranks can pass over what is not its."""
        places = ((shard_of(name), bucket, name) for name, bucket in self._index.items() if self._own.count(name))
        for _, bucket, name in sorted(places, key=lambda place: place[0]):
            for answer_index, answer in enumerate(self._own.get(name)):
                yield Row(name, bucket, self._index.position(name), answer_index, answer)


def _check_agreement(folder: Path, summary: Summary, listings: list[Listing], retired: set[str]) -> None:
    """All files must be of the same buffer, and no retired question may have answers."""
    found = (len(listings), sum(question.num_answers for question in listings))
    if found != (summary.num_questions, summary.num_answers):
        raise CheckpointError(
            f"{folder}: its files hold {found[0]} questions and {found[1]} answers, but {SUMMARY_FILE} says "
            f"{summary.num_questions} and {summary.num_answers}. Use another checkpoint."
        )
    for question in listings:
        if question.question_id in retired:
            raise question.fault(f"it is retired according to {SUMMARY_FILE}")
