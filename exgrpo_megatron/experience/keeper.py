"""What one process keeps of the buffer: the store of its questions' answers, caps a question, damage, compaction."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.experience.adding import Added, Lot, add_all
from exgrpo_megatron.experience.answers import (
    SEGMENT_BYTES,
    SEGMENT_FILE,
    AnswerStore,
    DamagedAnswer,
    SegmentFolder,
)
from exgrpo_megatron.experience.changes import Kept
from exgrpo_megatron.experience.compaction import Compactor
from exgrpo_megatron.experience.eviction import evict_of_question
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.quarantine import set_aside
from exgrpo_megatron.types import StoredAnswer

logger = logging.getLogger(__name__)

RANK_FOLDER = re.compile(r"rank-(\d{5,})")
"""Of a rank's segments, in the folder of a run's."""


class Keeper:
    """Knows questions by their rows in the table of ids. Nothing here is collective."""

    def __init__(self, config: ExperienceConfig, folder: Path | None, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._config = config
        self._segment_bytes = segment_bytes
        self._folder = SegmentFolder(folder)
        self.store = self.another()
        self._compactor = Compactor(self.store, segment_bytes)

    def another(self) -> AnswerStore:
        """An empty store in the same place, to be filled from files before `become` takes it."""
        return AnswerStore(self._folder, self._segment_bytes)

    def become(self, store: AnswerStore) -> None:
        """Keep what `store` has, and nothing else."""
        self._compactor.wait()
        self.store.close()
        self.store = store
        self._compactor = Compactor(store, self._segment_bytes)

    def keep(self, row: int, question_id: str, answers: Sequence[StoredAnswer], serial: int) -> Kept:
        """Store new answers, whose serials begin with `serial`, and hold the question to its cap."""
        return self.keep_all([Lot(row, question_id, serial, answers)])[0]

    def keep_all(self, lots: Sequence[Lot]) -> list[Kept]:
        """`keep` for different questions, which are written together."""
        store = self.store
        if self._config.on_corruption == "quarantine":
            # An answer that was added before is read, and written for that, where one with the same tokens follows.
            store.fill_up()
        return [self._kept(lot, added) for lot, added in zip(lots, add_all(store, lots), strict=True)]

    def forget(self, row: int) -> Kept:
        """Drop the question's answers."""
        _, length = self.store.forget(row)
        return Kept(stored=(), duplicates=0, num_answers=0, num_bytes=-length)

    def drop(self, row: int, serial: int) -> None:
        """Drop one answer of a question."""
        store = self.store
        (slot,) = (slot for slot in store.slots(row) if int(store.column("serial")[slot]) == serial)
        store.remove(slot)

    def tidy(self) -> None:
        """At the end of a step: everything onto the disk, and on with compaction; raises CheckpointError."""
        if self._config.on_corruption == "quarantine":
            self.store.fill_up()
        self.store.flush()
        self._compactor.step()

    def damage(self, rows: Sequence[int], ids: IdTable) -> Counter[str]:
        """Check the records of the questions; returns what each question has lost, if segments had to be set aside.

        Raises:
            DamagedAnswer: a record is damaged, and `experience.on_corruption` is `refuse`.
        """
        return self._set_aside(self._damaged_segments(rows), ids)

    def missing(self, ids: IdTable) -> Counter[str]:
        """Check that the files of all segments are there, as long as they were written; returns and raises as `damage`
        does. For a checkpoint, which is to have links to them."""
        if self._config.on_corruption == "quarantine":
            self.store.fill_up()
        found = []
        for number, segment in self.store.segments.items():
            if segment.live_bytes and not segment.is_there():
                if self._config.on_corruption == "refuse":
                    raise DamagedAnswer(
                        f"{segment.path}: this segment of stored answers is missing or cut off. Go on from a "
                        "checkpoint, or set experience.on_corruption to 'quarantine' to go on without such answers",
                        number,
                    )
                found.append(number)
        return self._set_aside(found, ids)

    def close(self) -> None:
        """Delete the files, all of them but those that were set aside."""
        self._compactor.wait()
        self.store.close()
        self._folder.remove_empty()

    def _kept(self, lot: Lot, added: Added) -> Kept:
        """The question is held to its cap."""
        before = self.store.num_bytes
        cap, policy = self._config.max_answers_per_question, self._config.eviction
        evicted = evict_of_question(self.store, lot.question, cap, policy) if cap is not None else ()
        return Kept(
            stored=added.serials,
            duplicates=len(lot.answers) - len(added.serials),
            num_answers=added.num_answers - len(evicted),
            num_bytes=added.num_bytes + self.store.num_bytes - before,
            evicted=evicted,
        )

    def _set_aside(self, numbers: Sequence[int], ids: IdTable) -> Counter[str]:
        """What each question loses with these segments."""
        lost: Counter[str] = Counter()
        for number in numbers:
            self._compactor.wait()
            self.store.seal()
            if number in self.store.segments:
                lost += set_aside(self.store, number, ids)
        return lost

    def _damaged_segments(self, rows: Sequence[int]) -> list[int]:
        """Where the questions have a damaged record."""
        found = set()
        for record in self.store.records([slot for row in rows for slot in self.store.slots(row)]):
            if isinstance(record, DamagedAnswer):
                if self._config.on_corruption == "refuse":
                    raise record
                found.add(record.segment)
        return sorted(found)


def delete_left_over(folder: Path, rank: int, num_ranks: int) -> None:
    """Delete, with a warning, what a killed run left of a rank, and of those ranks that there are no more: numbers that
    are the same modulo `num_ranks`, so that every file is deleted by one process."""
    found: list[Path] = []
    # Another process removes the folder when the last file in it was its own.
    with suppress(FileNotFoundError):
        found = sorted(folder.iterdir())
    for path in found:
        named = RANK_FOLDER.fullmatch(path.name)
        if named is None or int(named[1]) % num_ranks != rank or not path.is_dir():
            continue
        files = [file for file in path.iterdir() if SEGMENT_FILE.fullmatch(file.name)]
        for file in files:
            file.unlink()
        if files:
            logger.warning(
                "%s: %d files with answers of a run that was killed are deleted: a run goes on from a checkpoint",
                path, len(files),
            )  # fmt: skip
        SegmentFolder(path).remove_empty()
