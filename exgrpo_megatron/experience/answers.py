"""The stored answers themselves, of the questions that one process owns: on disk, with a small table in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.columns import Columns
from exgrpo_megatron.experience.encoding import decode, is_whole, serial_of
from exgrpo_megatron.experience.segments import Sealed, Segment, link_or_copy
from exgrpo_megatron.types import StoredAnswer, TokenIds

Slots = NDArray[np.int64]
"""Rows of the table of answers."""
SEGMENT_BYTES = 64 * 2**20
"""A segment of this size takes no more records."""
SEGMENT_FILE = re.compile(r"segment-(\d{6,})\.seg(\.compacting)?")
NOBODY = -1
COLUMNS = ("offset", "length", "fingerprint", "serial", "used", "entropy")
"""What of an answer is kept in memory and in a checkpoint's index, besides its question and its segment."""


class DamagedAnswer(CheckpointError):
    """A record that is not what was written; `segment` is the number of the one it stands in."""

    def __init__(self, message: str, segment: int = NOBODY) -> None:
        super().__init__(message)
        self.segment = segment


class SegmentFolder:
    """Where the segments of one process lie, and their numbers; None: in memory. Made when the first one is."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._numbers = count()

    def new(self, suffix: str = "") -> tuple[int, Segment]:
        number = next(self._numbers)
        return number, Segment(self._file(number, suffix))

    def adopt(self, source: Path, sealed: Sealed) -> tuple[int, Segment]:
        """A segment of a checkpoint as one of this folder: a hard link, or a copy on another file system."""
        number = next(self._numbers)
        path = self._file(number, "")
        if path is None:
            return number, Segment.existing(None, source.read_bytes(), sealed)
        link_or_copy(source, path)
        return number, Segment.existing(path, None, sealed)

    def remove_empty(self) -> None:
        """Delete the folder and the one above it, where nothing is left in them."""
        for path in () if self.path is None else (self.path, self.path.parent):
            with suppress(OSError):
                path.rmdir()

    def _file(self, number: int, suffix: str) -> Path | None:
        if self.path is None:
            return None
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path / f"segment-{number:06d}.seg{suffix}"


class AnswerStore:
    """Question (its row in the table of ids) -> its answers, oldest first, no two with the same token ids.

    In memory an answer has one row of the table, 36 bytes; the rest is read from its segment when it is asked for. The
    answers of a question are a list linked through the table.
    """

    def __init__(self, folder: SegmentFolder, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.segments: dict[int, Segment] = {}
        self._segment_bytes = segment_bytes
        self._active: int | None = None
        self._table = Columns(
            segment=np.int32, offset=np.uint32, length=np.uint32, fingerprint=np.uint32, serial=np.uint32,
            question=np.int32, next=np.int32, used=np.int32, entropy=np.float32,
        )  # fmt: skip
        self._first = Columns(slot=np.int32)
        """Of each question one more than its first slot; 0: it has none."""
        self._free = 0
        """One more than the first slot that may be used again; the others follow as answers of a question do."""
        self.num_answers = 0
        self.num_bytes = 0
        """Of the records of stored answers."""

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self._table.nbytes + self._first.nbytes

    @property
    def segment_bytes(self) -> int:
        """On disk, those of dropped answers included."""
        return sum(segment.size for segment in self.segments.values())

    def append(self, question: int, after: int, record: bytes, values: dict[str, Any]) -> int:
        """Take in a record as the answer of a question that comes after the slot `after`; returns its slot."""
        number, segment = self._room_for(len(record))
        slot = self._free_slot()
        row = {**values, "segment": number, "offset": segment.append(record), "length": len(record)}
        self._reserve(question)
        follows, place = (self._first["slot"], question) if after == NOBODY else (self._table["next"], after)
        for name, value in {**row, "question": question, "next": follows[place]}.items():
            self._table[name][slot] = value
        follows[place] = slot + 1
        self._count(segment, 1, len(record))
        return slot

    def append_all(self, records: Sequence[bytes], values: dict[str, Sequence[Any]]) -> list[int]:
        """Take in records with these columns; their slots, which are no question's yet."""
        places = [self._place(record) for record in records]
        slots = self._free_slots(len(records))
        if slots:
            segments, offsets, lengths = zip(*places, strict=True)
            for name, listed in {**values, "segment": segments, "offset": offsets, "length": lengths}.items():
                self._table[name][slots] = listed
        return slots

    def link_all(self, lots: Sequence[tuple[int, list[int], list[int]]]) -> None:
        """Of several questions each with all slots it has and the slots, if there are any, that are to come after
        these."""
        questions: list[int] = []
        slots: list[int] = []
        following: list[int] = []
        for question, before, coming in lots:
            if coming:
                self._reserve(question)
                column, place = (self._table["next"], before[-1]) if before else (self._first["slot"], question)
                column[place] = coming[0] + 1
                questions += [question] * len(coming)
                slots += coming
                following += [slot + 1 for slot in coming[1:]] + [0]
        if slots:
            self._table["question"][slots], self._table["next"][slots] = questions, following

    def adopt(self, questions: Slots, segments: Slots, columns: dict[str, NDArray[Any]]) -> None:
        """Into an empty store the answers of segments it has, those of a question together and oldest first."""
        assert len(self._table) == 0, "the store is not empty"
        self._table.extend(len(questions))
        for name, values in {**columns, "question": questions, "segment": segments}.items():
            self._table[name][:] = values
        begins = np.flatnonzero(np.diff(questions, prepend=-1))
        follows = np.arange(2, len(questions) + 2)
        follows[begins[1:] - 1] = 0
        follows[-1:] = 0
        self._table["next"][:] = follows
        if len(questions):
            self._reserve(int(questions.max()))
        self._first["slot"][questions[begins]] = begins + 1
        lengths = self._table["length"].astype(np.int64)
        for number in np.unique(segments).tolist():
            self.segments[number].live_bytes += int(lengths[segments == number].sum())
        self.num_answers, self.num_bytes = len(questions), int(lengths.sum())

    def slots(self, question: int) -> list[int]:
        """Of the question's answers, oldest first."""
        if question >= len(self._first):
            return []
        found, following = [], int(self._first["slot"][question])
        chain = self._table["next"].data
        while following:
            found.append(following - 1)
            following = chain[following - 1]
        return found

    def record(self, slot: int) -> bytes:
        """The answer as it stands in its segment; raises DamagedAnswer where that is not what was written."""
        (found,) = self.records([slot])
        if isinstance(found, DamagedAnswer):
            raise found
        return found

    def records(self, slots: Sequence[int]) -> Iterator[bytes | DamagedAnswer]:
        """`record` of each, or what it would raise."""
        columns = [self._table[name][slots].tolist() for name in ("segment", "offset", "length", "serial")]
        for number, offset, length, serial in zip(*columns, strict=True):
            segment = self.segments[number]
            data = segment.read(offset, length)
            if is_whole(data) and serial_of(data) == serial:
                yield data
            else:
                yield DamagedAnswer(
                    f"{segment.path}: a stored answer is damaged. Go on from a checkpoint, or set "
                    "experience.on_corruption to 'quarantine' to go on without such answers",
                    number,
                )

    def read(self, slot: int) -> StoredAnswer:
        """One answer; raises DamagedAnswer."""
        return decode(self.record(slot)).answer

    def has_tokens(self, slot: int, token_ids: TokenIds) -> bool:
        """Of a damaged record nobody knows: it is found when its question is drawn."""
        try:
            return bool(np.array_equal(self.read(slot).token_ids, token_ids))
        except DamagedAnswer:
            return False

    def get(self, question: int) -> tuple[StoredAnswer, ...]:
        """The question's answers; none for a question that is not stored."""
        return tuple(self.read(slot) for slot in self.slots(question))

    def entropies(self, question: int) -> NDArray[np.float32]:
        """Of the question's answers, oldest first, the means of -log-prob as recorded."""
        return self._table["entropy"][self.slots(question)]

    def live(self) -> Slots:
        """The slot of every answer."""
        return np.flatnonzero(self._table["length"])

    def column(self, name: str) -> NDArray[Any]:
        """One column of the table, by slot; to be read."""
        return self._table[name]

    def touch(self, slot: int, step: int) -> None:
        """Note that the answer was replayed in `step`."""
        self._table["used"][slot] = step

    def move(self, slot: int, segment: int, offset: int) -> None:
        """The answer's record now stands elsewhere."""
        table = self._table
        length = int(table["length"][slot])
        self.segments[int(table["segment"][slot])].live_bytes -= length
        self.segments[segment].live_bytes += length
        table["segment"][slot], table["offset"][slot] = segment, offset

    def rewrite(self, slot: int, record: bytes) -> None:
        """Append the answer's record anew and let it stand there."""
        number, segment = self._room_for(len(record))
        self.move(slot, number, segment.append(record))

    def remove(self, slot: int) -> int:
        """Forget one answer; returns the bytes of its record."""
        table = self._table
        question, follows = int(table["question"][slot]), int(table["next"][slot])
        listed = self.slots(question)
        place = listed.index(slot)
        if place:
            table["next"][listed[place - 1]] = follows
        else:
            self._first["slot"][question] = follows
        return self._give_back(slot)

    def forget(self, question: int) -> tuple[int, int]:
        """Forget the question's answers; returns how many there were, and their bytes."""
        lengths = [self._give_back(slot) for slot in reversed(self.slots(question))]
        if lengths:
            self._first["slot"][question] = 0
        return len(lengths), sum(lengths)

    def items(self) -> Iterator[tuple[int, tuple[StoredAnswer, ...]]]:
        """Every question with its answers."""
        for question in np.unique(self._table["question"][self.live()]).tolist():
            yield question, self.get(question)

    def flush(self) -> None:
        """Write what was added; raises CheckpointError."""
        if self._active is not None:
            self.segments[self._active].flush()

    def fill_up(self) -> None:
        """Let records be added although the file they are added to is gone; what it had is damaged."""
        if self._active is not None:
            self.segments[self._active].fill_up()

    def seal(self) -> None:
        """End the segment that records are added to; the next record begins another."""
        if self._active is not None:
            self.segments[self._active].seal()
            self._active = None

    def take(self, number: int, segment: Segment) -> None:
        """Make a segment, with records of which nobody knows yet, one of this store's."""
        self.segments[number] = segment

    def drop(self, number: int) -> None:
        """Delete a segment in which nothing is alive."""
        segment = self.segments.pop(number)
        assert segment.live_bytes == 0, "answers would be lost"
        segment.drop()

    def close(self) -> None:
        """Delete every segment."""
        for segment in self.segments.values():
            segment.drop()
        self.segments, self._active = {}, None

    def _place(self, record: bytes) -> tuple[int, int, int]:
        """(segment, offset, length) of the record, which is appended."""
        number, segment = self._room_for(len(record))
        self._count(segment, 1, len(record))
        return number, segment.append(record), len(record)

    def _room_for(self, length: int) -> tuple[int, Segment]:
        if self._active is not None and self.segments[self._active].size + length > self._segment_bytes:
            self.seal()
        if self._active is None:
            self._active, segment = self.folder.new()
            self.segments[self._active] = segment
        return self._active, self.segments[self._active]

    def _free_slot(self) -> int:
        if not self._free:
            return self._table.extend(1)
        slot = self._free - 1
        self._free = int(self._table["next"][slot])
        return slot

    def _free_slots(self, count: int) -> list[int]:
        taken: list[int] = []
        while self._free and len(taken) < count:
            taken.append(self._free_slot())
        first = self._table.extend(count - len(taken)) if len(taken) < count else 0
        return [*taken, *range(first, first + count - len(taken))]

    def _give_back(self, slot: int) -> int:
        """A slot that is in no list any more; returns the bytes of its record."""
        table = self._table
        length = int(table["length"][slot])
        self._count(self.segments[int(table["segment"][slot])], -1, -length)
        table["length"][slot], table["next"][slot] = 0, self._free
        self._free = slot + 1
        return length

    def _reserve(self, question: int) -> None:
        if question >= len(self._first):
            self._first.extend(question + 1 - len(self._first))

    def _count(self, segment: Segment, answers: int, length: int) -> None:
        segment.live_bytes += length
        self.num_answers += answers
        self.num_bytes += length
