"""Segments that are mostly dead, or small, written together anew: by a thread, while answers are read and added."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from exgrpo_megatron.background import in_background
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.answers import AnswerStore, DamagedAnswer
from exgrpo_megatron.experience.encoding import is_whole
from exgrpo_megatron.experience.segments import Segment

logger = logging.getLogger(__name__)

DEAD_SHARE = 0.5
"""A sealed segment with at least this share of dead bytes is written anew."""
MANY_SMALL = 16
"""So many sealed segments below a quarter of the full size are put together: every checkpoint seals one."""
_WRITTEN_AT_ONCE = 2**20


@dataclass(frozen=True)
class _Source:
    """A record to be copied."""

    slot: int
    serial: int
    number: int
    offset: int
    length: int


@dataclass(frozen=True)
class _Job:
    victims: list[int]
    number: int
    segment: Segment
    sources: list[_Source]
    offsets: Future[list[int]]
    """Where the thread put the records."""


class Compactor:
    """Keeps the segments of a store few and mostly alive. The store is read and changed by the caller's thread alone.

    The thread reads records of sealed segments, which never change, and writes a file that nobody reads yet. What was
    dropped meanwhile is dead in it from the beginning.
    """

    def __init__(self, store: AnswerStore, full_bytes: int) -> None:
        self._store, self._full_bytes = store, full_bytes
        self._job: _Job | None = None
        self._left_alone: set[int] = set()
        """Segments with a damaged record: whoever reads that one reports it."""

    def step(self) -> None:
        """Take in what the thread has finished, or else give it something to do."""
        if self._job is not None:
            if self._job.offsets.done():
                job, self._job = self._job, None
                self._finish(job)
            return
        self._drop_empty()
        victims = self._victims()
        if victims:
            self._begin(victims)

    def wait(self) -> None:
        """Until nothing is under way, and take it in."""
        if self._job is not None:
            self._job.offsets.exception()
            self.step()

    def _drop_empty(self) -> None:
        for number, segment in list(self._store.segments.items()):
            if segment.sealed and segment.live_bytes == 0:
                self._store.drop(number)

    def _victims(self) -> list[int]:
        sealed = {
            number: segment
            for number, segment in self._store.segments.items()
            if segment.sealed and number not in self._left_alone
        }
        found = [number for number, segment in sealed.items() if segment.dead_bytes >= DEAD_SHARE * segment.size]
        small = [number for number, segment in sealed.items() if 4 * segment.size < self._full_bytes]
        wanted = found or (small if len(small) >= MANY_SMALL else [])
        room = np.cumsum([sealed[number].live_bytes for number in wanted])
        return [number for number, total in zip(wanted, room.tolist(), strict=True) if total <= self._full_bytes]

    def _begin(self, victims: list[int]) -> None:
        store = self._store
        live = store.live()
        chosen = live[np.isin(store.column("segment")[live], victims)]
        chosen = chosen[np.argsort(store.column("serial")[chosen])]
        columns = [store.column(name)[chosen].tolist() for name in ("serial", "segment", "offset", "length")]
        sources = [_Source(*values) for values in zip(chosen.tolist(), *columns, strict=True)]
        number, target = store.folder.new(".compacting")
        read_from = {victim: store.segments[victim] for victim in victims}
        offsets = in_background(lambda: _copied(sources, read_from, target))
        self._job = _Job(victims, number, target, sources, offsets)

    def _finish(self, job: _Job) -> None:
        store = self._store
        try:
            offsets = job.offsets.result()
        except CheckpointError as error:
            logger.warning("answers are not compacted: %s", error)
            if isinstance(error, DamagedAnswer):
                self._left_alone.add(error.segment)
            job.segment.drop()
            return
        if job.segment.path is not None:
            job.segment.path = job.segment.path.rename(job.segment.path.with_suffix(""))
        store.take(job.number, job.segment)
        serials, numbers = store.column("serial"), store.column("segment")
        lengths = store.column("length")
        for source, offset in zip(job.sources, offsets, strict=True):
            same = int(serials[source.slot]) == source.serial and int(numbers[source.slot]) == source.number
            if same and lengths[source.slot]:
                store.move(source.slot, job.number, offset)
        self._drop_empty()


def _copied(sources: list[_Source], segments: dict[int, Segment], target: Segment) -> list[int]:
    """Raises DamagedAnswer, or CheckpointError where a record cannot be written: there may be room later."""
    offsets, waiting = [], 0
    for source in sources:
        record = segments[source.number].read(source.offset, source.length)
        if not is_whole(record):
            where = segments[source.number].path
            raise DamagedAnswer(f"{where}: a record at byte {source.offset} is damaged", source.number)
        offsets.append(target.append(record))
        waiting += len(record)
        if waiting >= _WRITTEN_AT_ONCE:
            target.flush()
            waiting = 0
    target.seal()
    return offsets
