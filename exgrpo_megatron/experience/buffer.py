"""The experience buffer E and the retired set S of Algorithm 1 (arXiv:2510.02245), spread over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.comm import Communicator, all_gather_union, together
from exgrpo_megatron.config import BucketWeight, ExperienceConfig
from exgrpo_megatron.experience import persistence
from exgrpo_megatron.experience.categories import NO_CATEGORIES, Categories
from exgrpo_megatron.experience.changes import changes_of
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.keeper import Keeper, delete_left_over
from exgrpo_megatron.experience.question_draw import Pool, Range, draw_questions
from exgrpo_megatron.experience.question_stats import QuestionStats, StatsKept
from exgrpo_megatron.experience.reports import MergeReport, RecordReport
from exgrpo_megatron.experience.selection import within
from exgrpo_megatron.experience.snapshot import CheckpointSnapshot
from exgrpo_megatron.experience.state import BufferState
from exgrpo_megatron.types import Group, StoredAnswer, TokenIds


class ExperienceBuffer:
    """Correct answers by question, questions by bucket, and the questions that are solved for good.

    Every process holds the index (question -> bucket, number of answers) and the retired questions, and changes them
    alike: draws depend on them only, and so not on the number of ranks. The answers of a question are kept by one
    process, the first of the data-parallel rank that owns its shard: in segments in `folder`, or in memory where there
    is none. Methods marked collective, and the making of one with a folder, must be called on every process with the
    same arguments.
    """

    def __init__(
        self,
        config: ExperienceConfig,
        group_size: int,
        comm: Communicator,
        folder: Path | None = None,
        *,
        pass_rate_decay: float | None = None,
        categories: Mapping[str, str | None] | None = None,
    ) -> None:
        """`pass_rate_decay`: how much of a running pass rate stays when a group is added; None: none is kept.
        `categories` of the questions, for `experience.difficulty_per_category`."""
        assert config.bucket_weight is not None, "experience.bucket_weight is unresolved"
        self._config = config
        self._comm = comm
        mine = folder / f"rank-{comm.rank:05d}" if folder and comm.member == 0 else None
        if folder:
            with together(comm):
                if comm.member == 0:
                    delete_left_over(folder, comm.rank, comm.size)
        kept = StatsKept(pass_rate_decay, config.difficulty_window or 0, rewards=config.difficulty == "reward_variance")
        split = Categories(categories or {}) if config.difficulty_per_category else NO_CATEGORIES
        self._state = BufferState(config, group_size, comm, Keeper(config, mine), kept, split)
        self._num_drawable = 0

    @property
    def num_questions(self) -> int:
        return len(self._state.index)

    @property
    def num_answers(self) -> int:
        """Over all ranks."""
        return self._state.index.total_answers

    @property
    def num_bytes(self) -> int:
        """Of the records of all stored answers, over all ranks."""
        return self._state.num_bytes

    @property
    def num_damaged(self) -> int:
        """Answers lost to damaged files in this run."""
        return self._state.num_damaged

    @property
    def num_own_answers(self) -> int:
        """Kept by this process."""
        return self._state.keeper.store.num_answers

    @property
    def own_segment_bytes(self) -> int:
        """Size of this process's segments, dropped answers that still lie in them included."""
        return self._state.keeper.store.segment_bytes

    @property
    def index_nbytes(self) -> int:
        """Memory that the index takes on every process, and with it what is known of questions."""
        return self._state.index.nbytes + self._state.stats.nbytes

    @property
    def own_table_nbytes(self) -> int:
        """Memory that this process takes for the answers it keeps."""
        return self._state.keeper.store.nbytes

    @property
    def retired(self) -> frozenset[str]:
        return frozenset(self._state.index.retired())

    @property
    def num_retired(self) -> int:
        return self._state.index.num_retired

    def is_retired(self, question_id: str) -> bool:
        return self._state.index.is_retired(question_id)

    @property
    def stats(self) -> QuestionStats:
        """What is known of every question that was attempted; to be read, and the same on every process."""
        return self._state.stats

    def running_pass_rate(self, question_id: str) -> float:
        """Over its new answers, the later groups weighing more; 0 where it was never attempted in this run."""
        return float(self.running_pass_rates([question_id])[0])

    def running_pass_rates(self, question_ids: Sequence[str]) -> NDArray[np.float64]:
        """`running_pass_rate` of each."""
        return np.nan_to_num(self.stats.pass_rates(self.stats.rows(question_ids)), nan=0.0)

    def bucket_sizes(self) -> dict[int, int]:
        """Number of stored questions by k, for every k in 1..K-1."""
        return dict(enumerate(self._state.index.sizes.tolist(), start=1))

    def count(self, question_id: str) -> int:
        """How many answers are stored for the question; known on every process."""
        return self._state.index.num_answers(question_id)

    def questions(self) -> Iterator[tuple[str, int]]:
        """Every stored question and its bucket, in the order that decides draws."""
        return self._state.index.items()

    def own_answers(self) -> Iterator[tuple[str, tuple[StoredAnswer, ...]]]:
        """What this process keeps, by question."""
        return ((self._state.index.ids.name(row), answers) for row, answers in self._state.keeper.store.items())

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        exclude: Collection[str] = frozenset(),
        *,
        weights: tuple[BucketWeight, float] | None = None,
        by: ExperienceConfig | None = None,
    ) -> list[str]:
        """Min(n, available) distinct questions to replay: a bucket by its weight, then uniformly within it; of those
        that `experience.difficulty_range` and `entropy_percentile` leave.

        `exclude`: questions that must not be drawn, such as those already in the batch. `by`: a section in place of the
        buffer's for this draw; what a question's rate is stays. `weights`: kind and width, in place of the section's.
        Time depends on `n`, not on the number of stored questions, unless there are such limits: then the buckets at
        the ends of the range, or all of them, are looked through at some 100 million questions a second.
        """
        config = by or self._config
        assert config.bucket_weight is not None
        weight, sigma = weights or (config.bucket_weight, config.bucket_sigma)
        index, pool = self._state.index, Pool(self._state.index)
        if config.difficulty_range is not None:
            pool.keep_range(Range(*config.difficulty_range, config.difficulty_range_unit), self._state.rating)
        if config.entropy_percentile is not None and len(index):
            pool.keep_entropies_up_to(self.entropy_limit(config.entropy_percentile))
        self._num_drawable = int(pool.sizes.sum())
        pool.exclude(exclude)
        return draw_questions(pool, n, weight, sigma, index.cell_sizes, rng)

    @property
    def num_drawable(self) -> int:
        """Questions that the last draw could choose from, before it excluded any."""
        return self._num_drawable

    def entropy_limit(self, percentile: float) -> float:
        """The lowest recorded entropy of an answer of the question at this percentile among those stored; they are
        known where `experience.entropy_percentile` is set."""
        return self._state.index.entropy_at(percentile)

    def entropies(self, question_ids: Sequence[str]) -> list[NDArray[np.float32]]:
        """Of each question the recorded entropies (means of -log-prob) of its answers, oldest first. Collective."""
        state = self._state
        mine = {
            name: state.keeper.store.entropies(state.index.row(name)) for name in question_ids if state.owner.owns(name)
        }
        found = all_gather_union(self._comm, mine)
        return [found[name] for name in question_ids]

    def rates(self, question_ids: Sequence[str]) -> NDArray[np.float64]:
        """How hard stored questions are, from 0 (hard) to 1, by `experience.difficulty`."""
        index = self._state.index
        rows = np.array([index.row(name) for name in question_ids], np.int64)
        return self._state.rating.rates(rows, index.places(rows)[0])

    def candidates(self, question_ids: Sequence[str]) -> list[list[int]]:
        """Of each question the answers that may be replayed, by their index, oldest first: all, or with
        `experience.entropy_percentile` those within the limit, or else the one of lowest entropy. Collective."""
        if self._config.entropy_percentile is None:
            return [list(range(self.count(name))) for name in question_ids]
        limit = self.entropy_limit(self._config.entropy_percentile)
        return [within(entropies, limit) for entropies in self.entropies(question_ids)]

    def intact(self, question_ids: Sequence[str]) -> list[str]:
        """Those of the questions that have a sound answer; damaged ones are dropped first. Collective.

        Raises:
            CheckpointError: one is damaged, and `experience.on_corruption` is `refuse`; on every process.
        """
        with together(self._comm):
            rows = [self._state.index.row(name) for name in question_ids if self._state.owner.owns(name)]
            lost = self._state.keeper.damage(rows, self._state.index.ids)
        self._state.lose(all_gather_union(self._comm, dict(lost)))
        return [name for name in question_ids if name in self._state.index]

    def token_ids(self, question_ids: Sequence[str]) -> list[list[TokenIds]]:
        """Of each question the token ids of its answers, oldest first, without their log-probs; collective.

        Raises:
            CheckpointError: a stored answer is damaged; on every process, as do the methods below.
        """
        with together(self._comm):
            mine = {
                name: [answer.token_ids for answer in self._state.own(name)]
                for name in question_ids
                if self._state.owner.owns(name)
            }
        found = all_gather_union(self._comm, mine)
        return [found[name] for name in question_ids]

    def fetch(self, chosen: Sequence[tuple[str, int]], *, replayed_in: int | None = None) -> list[StoredAnswer]:
        """The answers named by (question id, index among its answers, oldest first); collective.

        `replayed_in`: the step in which they are replayed, if they are.
        """
        store = self._state.keeper.store
        with together(self._comm):
            slots = {
                (name, i): store.slots(self._state.index.row(name))[i]
                for name, i in chosen
                if self._state.owner.owns(name)
            }
            mine = {key: store.read(slot) for key, slot in slots.items()}
        if replayed_in is not None:
            for slot in slots.values():
                store.touch(slot, replayed_in)
            for name, _ in chosen:
                self.stats.count_replay(self._state.index.row(name))
        found = all_gather_union(self._comm, mine)
        return [found[key] for key in chosen]

    def answers(self, question_id: str) -> tuple[StoredAnswer, ...]:
        """All answers of one question, oldest first; none where it is not stored. Collective."""
        return tuple(self.fetch([(question_id, index) for index in range(self.count(question_id))]))

    def extent(self) -> tuple[int, int]:
        """Tokens of the longest answer and the highest token id of any; (0, -1) where there is none. Collective."""
        longest, highest = 0, -1
        with together(self._comm):
            for answer in (answer for _, answers in self.own_answers() for answer in answers):
                longest, highest = max(longest, len(answer.token_ids)), max(highest, int(answer.token_ids.max()))
        ends = self._comm.all_gather((longest, highest))
        return max(end[0] for end in ends), max(end[1] for end in ends)

    def record(self, groups: list[Group], *, step: int, collect: bool, truncated: bool = True) -> RecordReport:
        """Take in the rewarded groups of a step, in order; `collect`: whether new correct answers are stored,
        `truncated`: those too that were cut off.

        Collective, with all groups on every process. With k correct of K: k == K retires the question and forgets its
        answers, unless `experience.retire_from` is `never`: then all are stored, and its bucket is K - 1; 0 < k < K
        stores the new correct answers and makes k the bucket of the question, if it has stored answers; k == 0 changes
        nothing. An answer without exactly one finite log-prob a token is refused. Then answers are evicted that are
        beyond a cap. Does nothing where `experience.enabled` is false. Groups may be of any size where k of K decides
        nothing: `experience.difficulty` is not `last_group`, and nothing retires.

        Raises:
            ValueError: a group is not of the buffer's group size.
            CheckpointError: answers cannot be written; on every process.
        """
        if not self._config.enabled:
            return RecordReport()
        any_size = self._config.difficulty != "last_group" and self._config.retire_from == "never"
        for group in () if any_size else groups:
            if group.size != self._state.group_size:
                raise ValueError(f"a group of {group.size} members in a buffer for groups of {self._state.group_size}")
        changes, report = changes_of(
            groups,
            self._state.index.is_retired,
            step=step,
            collect=collect,
            truncated=truncated,
            retire=self._config.retire_from != "never",
            solved_above=self._config.solved_above,
        )
        serials = self._state.take_serials([len(change.answers) for change in changes])
        with together(self._comm):
            mine = self._state.keep_changes(changes, serials)
            self._state.keeper.tidy()
        kept = all_gather_union(self._comm, mine)
        self._state.observe(groups, step)
        report.events[:0] = self._state.take_events()
        for number, change in enumerate(changes):
            self._state.apply(change, kept[number], report)
        for_answers, for_bytes = self._state.hold_caps()
        report.evicted_of_answers, report.evicted_of_bytes = len(for_answers), len(for_bytes)
        report.events += [*for_answers, *for_bytes]
        self._state.refresh_entropies(change.question_id for change in changes)
        return report

    def bring_back(self, question_ids: Collection[str]) -> None:
        """Questions are retired no longer: stored again with their next group that is neither all wrong nor all right.
        Their answers were forgotten when they retired. To be called alike on every process."""
        for question_id in question_ids:
            self._state.index.bring_back(question_id)

    def take_events(self) -> list[Event]:
        """What became of questions since the last `record`, or the last call; `record` reports what nobody took."""
        return self._state.take_events()

    def keep_only(self, known: Collection[str]) -> int:
        """Forget stored questions that are not in `known` (a hash set); returns how many were forgotten. Collective."""
        unknown = [question_id for question_id, _ in self._state.index.items() if question_id not in known]
        for question_id in unknown:
            self._state.keeper.forget(self._state.index.row(question_id))
            self._state.index.remove(question_id)
        self._state.count_bytes()
        return len(unknown)

    def save(self, folder: Path) -> None:
        """Write this process's answers as Parquet into `folder`, which is made if need be, and the summary once: for
        other runs and other tools. Collective.

        Raises:
            OSError, CheckpointError: on every process, where one cannot write, or read what is stored.
        """
        persistence.save(self._state, folder)

    def snapshot(self) -> CheckpointSnapshot:
        """This process's part of the buffer as it is now, to be saved while the buffer changes; collective.

        Answers whose segment is gone are dropped first.

        Raises:
            CheckpointError: there are such, and `experience.on_corruption` is `refuse`; on every process.
        """
        return persistence.snapshot(self._state)

    def load(self, folder: Path) -> None:
        """Become the buffer that was saved, on whatever number of ranks, with the same future draws; collective.

        Raises:
            CheckpointError: a file is missing, damaged or disagrees with another; names the file and the row. It is
                raised on every process, and nothing is changed.
        """
        persistence.load(self._state, folder)

    def merge_file(self, path: Path) -> MergeReport:
        """Add the answers of another run (its experience folder, or the one Parquet file that has them); collective.

        A question stored here keeps its bucket, one retired here stays away, and the other run's retired questions
        are not taken over. Answers count as stored at step 0: the other run's steps say nothing about their age here.

        Raises:
            CheckpointError: a file is missing, damaged or for another group size; names the file and the row. It is
                raised on every process, and nothing is changed.
        """
        return persistence.merge_file(self._state, path)

    def close(self) -> None:
        """Delete what this process has on disk; the buffer cannot be used any more."""
        self._state.keeper.close()
