"""Answers of a run that was killed, from the segments it left: every whole record up to where a file breaks off."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from exgrpo_megatron.experience.answers import SEGMENT_FILE
from exgrpo_megatron.experience.encoding import Record, decode
from exgrpo_megatron.experience.segments import Segment, open_unsealed, records


class _Place(NamedTuple):
    serial: int
    question_id: str
    segment: Segment
    offset: int
    length: int


def find_segments(folder: Path) -> list[Path]:
    """The segments in a run's experience folder; none where it is no such folder.

    Those that compaction had not finished are left out: their records still stand where they were copied from.
    """
    if not folder.is_dir():
        return []
    files = folder.glob("rank-*/segment-*.seg")
    return sorted(path for path in files if SEGMENT_FILE.fullmatch(path.name))


class Recovery:
    """What the segments hold, in the order in which the run met it: each answer of a question once."""

    def __init__(self, paths: list[Path]) -> None:
        found: dict[tuple[str, int], _Place] = {}
        for segment in map(open_unsealed, paths):
            for offset, data in records(segment):
                record = decode(data)
                place = _Place(record.serial, record.question_id, segment, offset, len(data))
                known = (record.question_id, zlib.crc32(record.answer.token_ids.astype(np.int32).tobytes()))
                found[known] = min(place, found.get(known, place), key=lambda place: place.serial)
        self._places = sorted(found.values(), key=lambda place: place.serial)

    def num_answers(self) -> dict[str, int]:
        """By question, in the order of their first answers."""
        counts: dict[str, int] = {}
        for place in self._places:
            counts[place.question_id] = counts.get(place.question_id, 0) + 1
        return counts

    def by_question(self) -> Iterator[tuple[str, Iterator[Record]]]:
        """Every question with its answers, in the order of their first ones."""
        places: dict[str, list[_Place]] = {}
        for place in self._places:
            places.setdefault(place.question_id, []).append(place)
        return ((name, (_read(place) for place in listed)) for name, listed in places.items())

    def __iter__(self) -> Iterator[Record]:
        return map(_read, self._places)


def _read(place: _Place) -> Record:
    return decode(place.segment.read(place.offset, place.length))
