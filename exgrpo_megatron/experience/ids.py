"""Question ids interned: each once as bytes, found by its 64-bit digest, and known by its row from then on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.experience.columns import Columns
from exgrpo_megatron.experience.partition import digest_of, shard_of_digest

_LEAST_SLOTS = 128
_MOST_RECENT = 512
ABSENT = -1


class IdTable:
    """Question id <-> row 0, 1, ..., in the order of first use. Rows are never taken back.

    A hash table of rows (open addressing, at most two thirds full) finds the candidates by digest; the id's own bytes
    decide, so that two ids of one digest are told apart.
    """

    def __init__(self) -> None:
        self._rows = Columns(digest=np.uint64, end=np.uint32)
        self._text = bytearray()
        self._slots = np.full(_LEAST_SLOTS, ABSENT, np.int32)
        self._recent: dict[str, int] = {}
        """Some of those asked for last: a step asks for each of its questions several times."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + len(self._text) + self._slots.nbytes

    def find(self, question_id: str) -> int:
        """Its row, or ABSENT."""
        row = self._recent.get(question_id, ABSENT)
        if row == ABSENT:
            row = self._lookup(question_id.encode(), digest_of(question_id))[0]
            if row != ABSENT:
                self._remember(question_id, row)
        return row

    def intern(self, question_id: str) -> int:
        """Its row, a new one for a new id."""
        row = self._recent.get(question_id, ABSENT)
        if row != ABSENT:
            return row
        text, digest = question_id.encode(), digest_of(question_id)
        row, slot = self._lookup(text, digest)
        if row == ABSENT:
            row = self._append(text, digest)
            self._slots[slot] = row
            if 3 * len(self) > 2 * len(self._slots):
                self._rebuild()
        self._remember(question_id, row)
        return row

    def extend(self, question_ids: Sequence[str]) -> NDArray[np.int64]:
        """`intern` for many."""
        if len(self) == 0 and len(set(question_ids)) == len(question_ids):
            for question_id in question_ids:
                self._append(question_id.encode(), digest_of(question_id))
            self._rebuild()
            return np.arange(len(self))
        return np.array([self.intern(question_id) for question_id in question_ids], np.int64)

    def name(self, row: int) -> str:
        return self._bytes(row).decode()

    def shards(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The virtual shard of each row."""
        return shard_of_digest(self._rows["digest"][rows]).astype(np.int64)

    def _remember(self, question_id: str, row: int) -> None:
        if len(self._recent) == _MOST_RECENT:
            self._recent.clear()
        self._recent[question_id] = row

    def _bytes(self, row: int) -> bytes:
        ends = self._rows["end"]
        return bytes(self._text[int(ends[row - 1]) if row else 0 : int(ends[row])])

    def _lookup(self, text: bytes, digest: int) -> tuple[int, int]:
        """(row, its slot), or (ABSENT, the slot where it belongs)."""
        digests, mask = self._rows["digest"], len(self._slots) - 1
        slot = _first_slot(digest) & mask
        while (row := int(self._slots[slot])) != ABSENT:
            if int(digests[row]) == digest and self._bytes(row) == text:
                return row, slot
            slot = (slot + 1) & mask
        return ABSENT, slot

    def _append(self, text: bytes, digest: int) -> int:
        self._text += text
        row = self._rows.extend(1)
        self._rows["digest"][row] = digest
        self._rows["end"][row] = len(self._text)
        return row

    def _rebuild(self) -> None:
        """Room for a third to two thirds of the slots; every row is placed anew, all of them at once."""
        size = _LEAST_SLOTS
        while 2 * size < 3 * (len(self) + 1):
            size *= 2
        self._slots = np.full(size, ABSENT, np.int32)
        rows = np.arange(len(self), dtype=np.int32)
        slots = (_first_slots(self._rows["digest"]) & np.uint64(size - 1)).astype(np.int64)
        while len(rows):
            free = self._slots[slots] == ABSENT
            self._slots[slots[free]] = rows[free]
            waiting = self._slots[slots] != rows
            rows, slots = rows[waiting], (slots[waiting] + 1) & (size - 1)


# The bits of a digest that its shard does not use.
def _first_slot(digest: int) -> int:
    return digest >> 16


def _first_slots(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return digests >> np.uint64(16)
