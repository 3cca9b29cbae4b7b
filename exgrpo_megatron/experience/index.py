"""What every rank knows of every question: its bucket and how many answers it has, or that it is solved for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.experience.buckets import Sizes
from exgrpo_megatron.experience.categories import NO_CATEGORIES, Categories
from exgrpo_megatron.experience.columns import Columns
from exgrpo_megatron.experience.ids import ABSENT, IdTable


class QuestionIndex:
    """Question id -> bucket, with one dense list a cell, so that a draw never looks at the questions it skips.

    A cell has the questions of one category in one bucket; there is one category where they play no part.

    The order of the lists is part of the state: it decides, with the generator, which questions are drawn. It depends
    on the sequence of `put` and `remove` only, and putting `items()` into an empty index restores it. Questions are
    rows of arrays; a row, once given to an id, stays its own.
    """

    def __init__(
        self, group_size: int, categories: Categories = NO_CATEGORIES, *, with_entropies: bool = False
    ) -> None:
        """`with_entropies`: of each question the lowest entropy of its answers is known."""
        self.ids = IdTable()
        self.categories, self.group_size, self.num_buckets = categories, group_size, group_size - 1
        self._with_entropies = with_entropies
        self._entropy_at: dict[float, float] = {}
        more: dict[str, type] = {"category": np.int16} if categories.count > 1 else {}
        more |= {"entropy": np.float32} if with_entropies else {}
        self._rows = Columns(bucket=np.int16, position=np.int32, num_answers=np.int32, retired=np.bool_, **more)
        self._cells = [Columns(row=np.int32) for _ in range(categories.count * self.num_buckets)]
        self._lengths = [0] * len(self._cells)
        self._total_answers = 0
        self._num_retired = 0

    def __len__(self) -> int:
        return sum(self._lengths)

    def __contains__(self, question_id: str) -> bool:
        return self._stored_row(question_id) != ABSENT

    @property
    def nbytes(self) -> int:
        """In memory, ids included."""
        return self.ids.nbytes + self._rows.nbytes + sum(rows.nbytes for rows in self._cells)

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
        rows["bucket"][row], rows["position"][row] = bucket, self._append(self._cell(row, bucket), row)

    def remove(self, question_id: str) -> None:
        """Take the question out; the last one of its bucket takes its place in the list."""
        row = self._stored_row(question_id)
        if row == ABSENT:
            raise KeyError(question_id)
        self._take_out(row, int(self._rows["bucket"][row]))
        self._total_answers -= int(self._rows["num_answers"][row])
        self._rows["bucket"][row] = self._rows["num_answers"][row] = 0
        if self._with_entropies:
            self.set_entropies(np.array([row]), np.array([np.inf], np.float32))

    def rebucket(self, buckets: NDArray[np.int64]) -> int:
        """Move stored questions into other buckets, given by row, in the order of `items`; returns how many moved."""
        stored = np.concatenate([self.listed(cell) for cell in self._in_order()])
        moving = stored[self._rows["bucket"][stored] != buckets[stored]]
        for row in moving.tolist():
            self._take_out(row, int(self._rows["bucket"][row]))
            bucket = int(buckets[row])
            self._rows["bucket"][row] = bucket
            self._rows["position"][row] = self._append(self._cell(row, bucket), row)
        return len(moving)

    def fill(self, question_ids: Sequence[str], buckets: NDArray[np.int64], num_answers: NDArray[np.int64]) -> None:
        """`put` for many distinct questions into an empty index, in their order."""
        assert len(self.ids) == 0, "the index is not empty"
        self.ids.extend(question_ids)
        rows = self._rows
        rows.extend(len(question_ids))
        rows["bucket"][:], rows["num_answers"][:] = buckets, num_answers
        self._begin(0)
        cells = self._categories(np.arange(len(rows))) * self.num_buckets + buckets - 1
        order = np.argsort(cells, kind="stable")
        ends = np.cumsum(np.bincount(cells, minlength=len(self._cells)))
        for cell, members in enumerate(np.split(order, ends[:-1])):
            self._cells[cell].extend(len(members))
            self._cells[cell]["row"][:] = members
            rows["position"][members] = np.arange(len(members))
            self._lengths[cell] = len(members)
        self._total_answers = int(num_answers.sum())

    def row(self, question_id: str) -> int:
        """The question's row, a new one where it was never seen."""
        row = self.ids.intern(question_id)
        if row >= len(self._rows):
            self._begin(self._rows.extend(row + 1 - len(self._rows)))
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
        """Its place in its bucket, whose cells come one after the other."""
        return int(self.places(np.array([self._known_row(question_id)]))[1][0])

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bucket and position of each of the rows."""
        columns, sizes = self._rows, self.cell_sizes
        buckets = columns["bucket"][rows].astype(np.int64)
        before = (np.cumsum(sizes, axis=0) - sizes)[self._categories(rows), buckets - 1]
        return buckets, before + columns["position"][rows]

    def buckets(self) -> NDArray[np.int64]:
        """By row; 0: not stored."""
        return self._rows["bucket"].astype(np.int64)

    def listed(self, cell: int) -> NDArray[np.int32]:
        """Rows of a cell (category * (K - 1) + bucket - 1), in its order; to be read."""
        return self._cells[cell]["row"][: self._lengths[cell]]

    @property
    def entropies(self) -> NDArray[np.float32]:
        """By row the lowest entropy of the question's answers; infinity where it is not stored."""
        return self._rows["entropy"]

    def set_entropies(self, rows: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        # Never below 0, and no -0.0: then numbers are in the order of their bits.
        self._rows["entropy"][rows] = np.maximum(values, np.float32(0)) + np.float32(0)
        self._entropy_at = {}

    def entropy_at(self, percentile: float) -> float:
        """The smallest of them that this many percent of the stored questions do not exceed; infinity where none is."""
        if not len(self):
            return float("inf")
        if percentile not in self._entropy_at:
            place = max(int(np.ceil(percentile * len(self) / 100)) - 1, 0)
            self._entropy_at[percentile] = _in_place(self.entropies, place)
        return self._entropy_at[percentile]

    def num_answers(self, question_id: str) -> int:
        """Answers of the question; 0 where it is not stored."""
        row = self._stored_row(question_id)
        return 0 if row == ABSENT else int(self._rows["num_answers"][row])

    @property
    def total_answers(self) -> int:
        return self._total_answers

    @property
    def sizes(self) -> Sizes:
        """Questions in each bucket."""
        return self.cell_sizes.sum(axis=0)

    @property
    def cell_sizes(self) -> Sizes:
        """Questions in each cell, shape [categories, K - 1]."""
        return np.array(self._lengths, dtype=np.int64).reshape(-1, self.num_buckets)

    def items(self) -> Iterator[tuple[str, int]]:
        """Question id and bucket, bucket by bucket, in the order of the lists."""
        for cell in self._in_order():
            for row in self.listed(cell).tolist():
                yield self.ids.name(row), cell % self.num_buckets + 1

    def positions(self, question_ids: Iterable[str]) -> list[list[int]]:
        """For each cell, the sorted places in its list of those of the questions that are stored."""
        found: list[set[int]] = [set() for _ in self._cells]
        for question_id in question_ids:
            row = self._stored_row(question_id)
            if row != ABSENT:
                cell = self._cell(row, int(self._rows["bucket"][row]))
                found[cell].add(int(self._rows["position"][row]))
        return [sorted(positions) for positions in found]

    def sample(self, cell: int, count: int, excluded: list[int], rng: np.random.Generator) -> list[str]:
        """`count` distinct questions of a cell, uniformly among those not at an `excluded` place (sorted)."""
        rows = self.listed(cell)
        length = len(rows)
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

    def _in_order(self) -> list[int]:
        """The cells bucket by bucket."""
        return np.arange(len(self._cells)).reshape(-1, self.num_buckets).T.ravel().tolist()

    def _cell(self, row: int, bucket: int) -> int:
        category = int(self._rows["category"][row]) if self.categories.count > 1 else 0
        return category * self.num_buckets + bucket - 1

    def _categories(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.categories.count == 1:
            return np.zeros(len(rows), np.int64)
        return self._rows["category"][rows].astype(np.int64)

    def _begin(self, first: int) -> None:
        """What new rows have from the first on."""
        if self._with_entropies:
            self.set_entropies(np.arange(first, len(self._rows)), np.full(len(self._rows) - first, np.inf, np.float32))
        if self.categories.count > 1:
            rows = range(first, len(self._rows))
            self._rows["category"][first:] = [self.categories.number(self.ids.name(row)) for row in rows]

    def _append(self, cell: int, row: int) -> int:
        listed, place = self._cells[cell], self._lengths[cell]
        if place == len(listed):
            listed.extend(1)
        listed["row"][place] = row
        self._lengths[cell] += 1
        return place

    def _take_out(self, row: int, bucket: int) -> None:
        cell, place = self._cell(row, bucket), int(self._rows["position"][row])
        listed = self._cells[cell]["row"]
        self._lengths[cell] -= 1
        last = int(listed[self._lengths[cell]])
        listed[place] = last
        self._rows["position"][last] = place


def _in_place(values: NDArray[np.float32], place: int) -> float:
    """What stands at a place of the values in ascending order, none of them below 0: the upper halves of their bits are
    counted, and only those that share one are sorted. Of a million this is more than twice as fast as a partition."""
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    ends = np.cumsum(np.bincount(upper))
    half = int(np.searchsorted(ends, place, side="right"))
    return float(np.sort(values[upper == half])[place - (int(ends[half - 1]) if half else 0)])
