"""What every rank knows of every question: its bucket and how many answers it has, or that it is solved for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.experience.buckets import Sizes
from exgrpo_megatron.experience.columns import Columns
from exgrpo_megatron.experience.ids import ABSENT, IdTable


class QuestionIndex:
    """Question id -> bucket, with one dense list a bucket, so that a draw never looks at the questions it skips.

    The order of the lists is part of the state: it decides, with the generator, which questions are drawn. It depends
    on the sequence of `put` and `remove` only, and putting `items()` into an empty index restores it. Questions are
    rows of arrays; a row, once given to an id, stays its own.
    """

    def __init__(self, group_size: int) -> None:
        self.ids = IdTable()
        self._rows = Columns(bucket=np.int16, position=np.int32, num_answers=np.int32, retired=np.bool_)
        self._buckets = [Columns(row=np.int32) for _ in range(group_size - 1)]
        self._lengths = [0] * (group_size - 1)
        self._total_answers = 0
        self._num_retired = 0

    def __len__(self) -> int:
        return sum(self._lengths)

    def __contains__(self, question_id: str) -> bool:
        return self._stored_row(question_id) != ABSENT

    @property
    def nbytes(self) -> int:
        """In memory, ids included."""
        return self.ids.nbytes + self._rows.nbytes + sum(rows.nbytes for rows in self._buckets)

    def put(self, question_id: str, bucket: int, num_answers: int) -> None:
        """Add the question, or move it to `bucket` (1..K-1)."""
        row = self.row(question_id)
        rows = self._rows
        before = int(rows["bucket"][row])
        self._total_answers += num_answers - int(rows["num_answers"][row])
        rows["num_answers"][row] = num_answers
        if before == bucket:
            return
        if before:
            self._take_out(row, before)
        rows["bucket"][row], rows["position"][row] = bucket, self._append(bucket, row)

    def remove(self, question_id: str) -> None:
        """Take the question out; the last one of its bucket takes its place in the list."""
        row = self._stored_row(question_id)
        if row == ABSENT:
            raise KeyError(question_id)
        self._take_out(row, int(self._rows["bucket"][row]))
        self._total_answers -= int(self._rows["num_answers"][row])
        self._rows["bucket"][row] = self._rows["num_answers"][row] = 0

    def fill(self, question_ids: Sequence[str], buckets: NDArray[np.int64], num_answers: NDArray[np.int64]) -> None:
        """`put` for many distinct questions into an empty index, in their order."""
        assert len(self.ids) == 0, "the index is not empty"
        self.ids.extend(question_ids)
        rows = self._rows
        rows.extend(len(question_ids))
        rows["bucket"][:], rows["num_answers"][:] = buckets, num_answers
        for bucket, listed in enumerate(self._buckets, start=1):
            members = np.flatnonzero(buckets == bucket)
            listed.extend(len(members))
            listed["row"][:] = members
            rows["position"][members] = np.arange(len(members))
            self._lengths[bucket - 1] = len(members)
        self._total_answers = int(num_answers.sum())

    def row(self, question_id: str) -> int:
        """The question's row, a new one where it was never seen."""
        row = self.ids.intern(question_id)
        if row >= len(self._rows):
            self._rows.extend(row + 1 - len(self._rows))
        return row

    def retire(self, question_id: str) -> None:
        row = self.row(question_id)
        self._num_retired += not self._rows["retired"][row]
        self._rows["retired"][row] = True

    def bring_back(self, question_id: str) -> None:
        """Undo `retire`; the question is as one that was never tried."""
        row = self.row(question_id)
        self._num_retired -= bool(self._rows["retired"][row])
        self._rows["retired"][row] = False

    def is_retired(self, question_id: str) -> bool:
        row = self.ids.find(question_id)
        return row != ABSENT and bool(self._rows["retired"][row])

    @property
    def num_retired(self) -> int:
        return self._num_retired

    def retired(self) -> Iterator[str]:
        """Ids of the questions that are solved for good."""
        return map(self.ids.name, np.flatnonzero(self._rows["retired"]).tolist())

    def bucket(self, question_id: str) -> int:
        return int(self._rows["bucket"][self._known_row(question_id)])

    def position(self, question_id: str) -> int:
        """Its place in the list of its bucket."""
        return int(self._rows["position"][self._known_row(question_id)])

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bucket and position of each of the rows."""
        columns = self._rows
        return columns["bucket"][rows].astype(np.int64), columns["position"][rows].astype(np.int64)

    def num_answers(self, question_id: str) -> int:
        """Answers of the question; 0 where it is not stored."""
        row = self._stored_row(question_id)
        return 0 if row == ABSENT else int(self._rows["num_answers"][row])

    @property
    def total_answers(self) -> int:
        return self._total_answers

    @property
    def sizes(self) -> Sizes:
        return np.array(self._lengths, dtype=np.int64)

    def items(self) -> Iterator[tuple[str, int]]:
        """Question id and bucket, bucket by bucket, in the order of the lists."""
        for bucket, length in enumerate(list(self._lengths), start=1):
            for row in self._buckets[bucket - 1]["row"][:length].tolist():
                yield self.ids.name(row), bucket

    def positions(self, question_ids: Iterable[str]) -> list[list[int]]:
        """For buckets 1..K-1, the sorted list positions of those of the questions that are stored."""
        found: list[set[int]] = [set() for _ in self._buckets]
        for question_id in question_ids:
            row = self._stored_row(question_id)
            if row != ABSENT:
                found[int(self._rows["bucket"][row]) - 1].add(int(self._rows["position"][row]))
        return [sorted(positions) for positions in found]

    def sample(self, bucket: int, count: int, excluded: list[int], rng: np.random.Generator) -> list[str]:
        """`count` distinct questions of a bucket, uniformly among those not at an `excluded` position (sorted)."""
        length, rows = self._lengths[bucket - 1], self._buckets[bucket - 1]["row"]
        room = length - len(excluded)
        # Draw from the first `room` positions. As many of these are excluded as there are free ones after them:
        # each excluded position stands for one of the latter, so that nothing as long as the bucket is built.
        taken = set(excluded)
        free_after = (position for position in range(room, length) if position not in taken)
        stands_for = dict(zip((position for position in excluded if position < room), free_after, strict=True))
        drawn = rng.choice(room, size=count, replace=False).tolist() if count else []
        return [self.ids.name(int(rows[stands_for.get(position, position)])) for position in drawn]

    def _known_row(self, question_id: str) -> int:
        row = self._stored_row(question_id)
        if row == ABSENT:
            raise KeyError(question_id)
        return row

    def _stored_row(self, question_id: str) -> int:
        row = self.ids.find(question_id)
        return row if row != ABSENT and self._rows["bucket"][row] else ABSENT

    def _append(self, bucket: int, row: int) -> int:
        listed, place = self._buckets[bucket - 1], self._lengths[bucket - 1]
        if place == len(listed):
            listed.extend(1)
        listed["row"][place] = row
        self._lengths[bucket - 1] += 1
        return place

    def _take_out(self, row: int, bucket: int) -> None:
        listed, place = self._buckets[bucket - 1]["row"], int(self._rows["position"][row])
        self._lengths[bucket - 1] -= 1
        last = int(listed[self._lengths[bucket - 1]])
        listed[place] = last
        self._rows["position"][last] = place
