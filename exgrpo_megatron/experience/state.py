"""What a buffer consists of on one process, and the changes to it that all processes make alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from exgrpo_megatron.comm import Communicator, all_gather_concat, all_gather_union
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.experience.adding import Lot
from exgrpo_megatron.experience.categories import Categories
from exgrpo_megatron.experience.changes import Change, Kept, left_out
from exgrpo_megatron.experience.difficulty import Rating, bucket_of
from exgrpo_megatron.experience.eviction import Candidate, candidates, evict_of_question, first_to_go
from exgrpo_megatron.experience.files import Row, Summary
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.keeper import Keeper
from exgrpo_megatron.experience.partition import shard_of
from exgrpo_megatron.experience.question_stats import QuestionStats, StatsKept
from exgrpo_megatron.experience.reports import MergeReport, RecordReport
from exgrpo_megatron.experience.restore import Owner
from exgrpo_megatron.types import Group, StoredAnswer


class BufferState:
    """The index, the statistics and the counters, the same on every process, and the answers, which are not."""

    def __init__(
        self,
        config: ExperienceConfig,
        group_size: int,
        comm: Communicator,
        keeper: Keeper,
        kept: StatsKept,
        categories: Categories,
    ) -> None:
        self.config, self.group_size, self.comm, self.keeper = config, group_size, comm, keeper
        self.categories = categories
        self.owner = Owner(comm.rank, comm.size, keeps=comm.member == 0)
        self.index = self.new_index()
        self.stats = QuestionStats(kept, self.index.ids)
        self.num_bytes = 0
        self.next_serial = 0
        self.num_damaged = 0
        self.events: list[Event] = []
        """What became of stored answers outside of `record`, until that reports it."""

    def new_index(self) -> QuestionIndex:
        """An empty one, to be filled from files before it takes the place of the other."""
        with_entropies = self.config.entropy_percentile is not None
        return QuestionIndex(self.group_size, self.categories, with_entropies=with_entropies)

    @property
    def rating(self) -> Rating:
        """How hard questions are."""
        config = self.config
        return Rating(config.difficulty, self.group_size, self.stats, config.difficulty_reward_range)

    def take_serials(self, counts: Sequence[int]) -> list[int]:
        """The first serial of each of several lots of answers."""
        firsts = list(accumulate(counts, initial=self.next_serial))
        self.next_serial = firsts.pop()
        return firsts

    def take_events(self) -> list[Event]:
        """Those of since the last call."""
        taken, self.events = self.events, []
        return taken

    def own(self, question_id: str) -> tuple[StoredAnswer, ...]:
        """The answers of a question that this process owns."""
        return self.keeper.store.get(self.index.row(question_id))

    def keep_changes(self, changes: Sequence[Change], serials: Sequence[int]) -> dict[int, Kept]:
        """The owner's part of a step's changes, by their place; the first serial of each is given."""
        mine: dict[int, Kept] = {}
        waiting: dict[str, tuple[int, Lot]] = {}

        def write() -> None:
            places, lots = [place for place, _ in waiting.values()], [lot for _, lot in waiting.values()]
            mine.update(zip(places, self.keeper.keep_all(lots), strict=True))
            waiting.clear()

        for place, (change, serial) in enumerate(zip(changes, serials, strict=True)):
            name = change.question_id
            if not self.owner.owns(name):
                continue
            # One after the other, where a question has two groups in a step.
            if name in waiting:
                write()
            if change.solved:
                mine[place] = self.forget(name)
            else:
                waiting[name] = (place, Lot(self.index.row(name), name, serial, change.answers))
        write()
        return mine

    def keep(self, question_id: str, answers: Sequence[StoredAnswer], serial: int) -> Kept:
        """The owner's part of new answers, whose serials begin with `serial`."""
        return self.keeper.keep(self.index.row(question_id), question_id, answers, serial)

    def forget(self, question_id: str) -> Kept:
        """The owner's part of a question that goes."""
        return self.keeper.forget(self.index.row(question_id))

    def observe(self, groups: Sequence[Group], step: int) -> None:
        """Everybody's part of what groups say of their questions, stored or not."""
        for group in groups:
            name = group.question.id
            row = self.index.row(name)
            self.stats.observe(row, group, step)
            if not self.rating.is_bucket and name in self.index:
                self.index.put(name, self.rating.bucket(row, group.num_correct), self.index.num_answers(name))

    def rebucket(self) -> int:
        """Everybody's part of questions from files, whose buckets may follow another definition of difficulty; returns
        how many move."""
        if self.rating.is_bucket:
            return 0
        buckets = self.index.buckets()
        rates = self.rating.rates(np.arange(len(buckets)), buckets)
        return self.index.rebucket(bucket_of(rates, self.group_size))

    def refresh_entropies(self, question_ids: Iterable[str]) -> None:
        """Ask the owners of questions, alike on every process, for the lowest entropies of their answers, where they
        play a part. Collective."""
        if self.config.entropy_percentile is None:
            return
        names = [name for name in dict.fromkeys(question_ids) if name in self.index]
        store = self.keeper.store
        mine = [
            (place, store.entropies(self.index.row(name)).min())
            for place, name in enumerate(names)
            if self.owner.owns(name)
        ]
        places = np.array([place for place, _ in mine], np.int64)
        values = np.array([value for _, value in mine], np.float32)
        for part_places, part_values in self.comm.all_gather((places, values)):
            rows = np.array([self.index.row(names[place]) for place in part_places.tolist()], np.int64)
            self.index.set_entropies(rows, part_values)

    def apply(self, change: Change, kept: Kept, report: RecordReport) -> None:
        """Everybody's part of a change, when its owner has done his."""
        report.stored += len(kept.stored)
        report.duplicates += kept.duplicates
        report.evicted_of_question += len(kept.evicted)
        report.events += left_out(change.question_id, kept.duplicates, "duplicate")
        report.events += [Event(change.question_id, "stored", answer=serial) for serial in kept.stored]
        report.events += evictions(change.question_id, kept.evicted)
        self.num_bytes += kept.num_bytes
        if change.solved:
            self.index.retire(change.question_id)
            if change.question_id in self.index:
                self.index.remove(change.question_id)
        elif kept.num_answers:
            bucket = self.rating.bucket(self.index.row(change.question_id), change.bucket)
            self.index.put(change.question_id, bucket, kept.num_answers)

    def enter(self, question_id: str, bucket: int, num_answers: int, kept: Kept | None, report: MergeReport) -> None:
        """Everybody's part of a question of another run, which had so many answers; `kept` is None where it is retired
        here."""
        if kept is None:
            report.retired += num_answers
            return
        known = question_id in self.index
        if kept.num_answers:
            row = self.index.row(question_id)
            bucket = self.index.bucket(question_id) if known else self.rating.bucket(row, bucket)
            self.index.put(question_id, bucket, kept.num_answers)
        report.questions += not known and kept.num_answers > 0
        report.answers += len(kept.stored)
        report.duplicates += kept.duplicates
        report.evicted += len(kept.evicted)
        self.events += [Event(question_id, "prefilled", count=len(kept.stored))] if kept.stored else []
        self.events += evictions(question_id, kept.evicted)
        self.num_bytes += kept.num_bytes

    def hold_caps(self) -> tuple[list[Event], list[Event]]:
        """Evict what is beyond `experience.max_answers`, then beyond `experience.max_bytes`; which answers for each.
        Collective."""
        max_answers, max_bytes = self.config.max_answers, self.config.max_bytes
        for_answers, for_bytes = [], []
        if max_answers is not None and self.index.total_answers > max_answers:
            for_answers = self._evict(self.index.total_answers - max_answers, 0, "max_answers")
        if max_bytes is not None and self.num_bytes > max_bytes:
            for_bytes = self._evict(0, self.num_bytes - max_bytes, "max_bytes")
        return for_answers, for_bytes

    def hold_question_cap(self) -> int:
        """Evict what is beyond `experience.max_answers_per_question` anywhere; how many. A run keeps to it as it stores
        answers, but may go on from one that had another. Collective."""
        cap, before = self.config.max_answers_per_question, self.index.total_answers
        if cap is None:
            return 0
        mine = {}
        beyond = [item for item in self.index.items() if self.index.num_answers(item[0]) > cap]
        for name, bucket in beyond:
            if self.owner.owns(name):
                mine[name] = evict_of_question(self.keeper.store, self.index.row(name), cap, self.config.eviction)
            self.index.put(name, bucket, cap)
        evicted = all_gather_union(self.comm, mine)
        self.refresh_entropies(name for name, _ in beyond)
        self.events += [event for name, _ in beyond for event in evictions(name, evicted[name])]
        return before - self.index.total_answers

    def lose(self, lost: Mapping[str, int]) -> None:
        """Everybody's part of answers that their owners found damaged, and have dropped. Collective."""
        for question_id in sorted(lost):
            self._forget_some(question_id, lost[question_id])
            self.num_damaged += lost[question_id]
            self.events.append(Event(question_id, "lost", count=lost[question_id]))
        if lost:
            self.refresh_entropies(sorted(lost))
            self.count_bytes()

    def count_bytes(self) -> None:
        """Collective."""
        self.num_bytes = sum(self.comm.all_gather(self.keeper.store.num_bytes))

    def rows(self) -> Iterator[Row]:
        """Of what this process keeps, shard by shard, so that another number of ranks can pass over what is not its."""
        places = ((shard_of(name), bucket, name) for name, bucket in self.index.items() if self.owner.owns(name))
        for _, bucket, name in sorted(places, key=lambda place: place[0]):
            for answer_index, answer in enumerate(self.own(name)):
                yield Row(name, bucket, self.index.position(name), answer_index, answer)

    def summary(self) -> Summary:
        return Summary(
            group_size=self.group_size,
            num_questions=len(self.index),
            num_answers=self.index.total_answers,
            retired=tuple(sorted(self.index.retired())),
            num_damaged=self.num_damaged,
            next_serial=self.next_serial,
        )

    def _evict(self, answers: int, length: int, key: str) -> list[Event]:
        """So many answers, or so many bytes, whoever keeps them; `key` is that of the limit."""
        store = self.keeper.store
        proposed = all_gather_concat(
            self.comm, candidates(store, self.index.ids, self.config.eviction, answers, length)
        )
        going = first_to_go(proposed, answers, length)
        for candidate in going:
            self._drop(candidate)
        self.refresh_entropies(candidate.question_id for candidate in going)
        return [event for one in going for event in evictions(one.question_id, (one.serial,), key)]

    def _drop(self, candidate: Candidate) -> None:
        if self.owner.owns(candidate.question_id):
            self.keeper.drop(self.index.row(candidate.question_id), candidate.serial)
        self.num_bytes -= candidate.length
        self._forget_some(candidate.question_id, 1)

    def _forget_some(self, question_id: str, count: int) -> None:
        left = self.index.num_answers(question_id) - count
        if left:
            self.index.put(question_id, self.index.bucket(question_id), left)
        else:
            self.index.remove(question_id)


def evictions(question_id: str, serials: Sequence[int], key: str = "max_answers_per_question") -> list[Event]:
    """Answers that went by the limit `experience.<key>`."""
    return [Event(question_id, "evicted", answer=serial, reason=key) for serial in serials]
