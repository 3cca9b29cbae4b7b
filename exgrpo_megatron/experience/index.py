"""What every rank knows of every stored question: its bucket, and how many answers are stored for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from exgrpo_megatron.experience.buckets import Sizes


@dataclass(slots=True)
class _Entry:
    bucket: int
    position: int
    num_answers: int


class QuestionIndex:
    """Question id -> bucket, with one dense list of ids a bucket, so that a draw never looks at the questions it skips.

    The order of the lists is part of the state: it decides, with the generator, which questions are drawn. It depends
    on the sequence of `put` and `remove` only, and putting `items()` into an empty index restores it.
    """

    def __init__(self, group_size: int) -> None:
        self._buckets: list[list[str]] = [[] for _ in range(group_size - 1)]
        self._entries: dict[str, _Entry] = {}
        self._total_answers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, question_id: str) -> bool:
        return question_id in self._entries

    def put(self, question_id: str, bucket: int, num_answers: int) -> None:
        """Add the question, or move it to `bucket` (1..K-1)."""
        entry = self._entries.get(question_id)
        if entry is not None and entry.bucket == bucket:
            self._total_answers += num_answers - entry.num_answers
            entry.num_answers = num_answers
            return
        if entry is not None:
            self.remove(question_id)
        self._total_answers += num_answers
        ids = self._buckets[bucket - 1]
        self._entries[question_id] = _Entry(bucket, len(ids), num_answers)
        ids.append(question_id)

    def remove(self, question_id: str) -> None:
        """Take the question out; the last one of its bucket takes its place in the list."""
        entry = self._entries.pop(question_id)
        self._total_answers -= entry.num_answers
        ids = self._buckets[entry.bucket - 1]
        last = ids.pop()
        if last != question_id:
            ids[entry.position] = last
            self._entries[last].position = entry.position

    def bucket(self, question_id: str) -> int:
        return self._entries[question_id].bucket

    def position(self, question_id: str) -> int:
        """Its place in the list of its bucket."""
        return self._entries[question_id].position

    def num_answers(self, question_id: str) -> int:
        """Answers of the question; 0 where it is not stored."""
        entry = self._entries.get(question_id)
        return entry.num_answers if entry else 0

    @property
    def total_answers(self) -> int:
        return self._total_answers

    @property
    def sizes(self) -> Sizes:
        return np.array([len(ids) for ids in self._buckets], dtype=np.int64)

    def items(self) -> Iterator[tuple[str, int]]:
        """Question id and bucket, bucket by bucket, in the order of the lists."""
        for bucket, ids in enumerate(self._buckets, start=1):
            for question_id in ids:
                yield question_id, bucket

    def positions(self, question_ids: Iterable[str]) -> list[list[int]]:
        """For buckets 1..K-1, the sorted list positions of those of the questions that are stored."""
        found: list[list[int]] = [[] for _ in self._buckets]
        for question_id in question_ids:
            entry = self._entries.get(question_id)
            if entry is not None:
                found[entry.bucket - 1].append(entry.position)
        return [sorted(set(positions)) for positions in found]

    def sample(self, bucket: int, count: int, excluded: list[int], rng: np.random.Generator) -> list[str]:
        """`count` distinct questions of a bucket, uniformly among those not at an `excluded` position (sorted)."""
        ids = self._buckets[bucket - 1]
        room = len(ids) - len(excluded)
        # Draw from the first `room` positions. As many of these are excluded as there are free ones after them:
        # each excluded position stands for one of the latter, so that nothing as long as the bucket is built.
        taken = set(excluded)
        free_after = (position for position in range(room, len(ids)) if position not in taken)
        stands_for = dict(zip((position for position in excluded if position < room), free_after, strict=True))
        drawn = rng.choice(room, size=count, replace=False).tolist() if count else []
        return [ids[stands_for.get(position, position)] for position in drawn]
