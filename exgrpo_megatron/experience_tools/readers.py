"""Stored answers read one by one, whatever they are kept in: nothing but an index is in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow.parquet as pq

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.encoding import HEADER_BYTES, decode, facts_of, is_whole
from exgrpo_megatron.experience.files import GROUP_SIZE_KEY, REMEDY, SUMMARY_FILE, Row, find_answers_files, read_summary
from exgrpo_megatron.experience.manifest import Manifest, read_manifest
from exgrpo_megatron.experience.partition import shard_of
from exgrpo_megatron.experience.reading import iterate_rows, question_ids
from exgrpo_megatron.experience.recovery import Recovery, find_segments
from exgrpo_megatron.experience.segments import Segment
from exgrpo_megatron.experience_tools.rows import LARGEST_GROUP, RowCheck, read_rows


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is to count about an answer."""

    question_id: str
    bucket: int
    num_tokens: int
    step: int
    entropy: float
    """Mean of -log-prob as recorded: an estimate of the mean entropy of the policy that wrote it, in nats."""
    num_bytes: int
    """Of its record; 0 where it is in no segment."""


class AnswerReader(Protocol):
    """Every method reads the files anew; all raise CheckpointError or DataError for what cannot be read."""

    kind: str
    """What it is, for people."""
    group_size: int | None
    """None: the files do not say."""

    def rows(self, only: Collection[str] | None = None) -> Iterator[Row]:
        """Every answer, or those of some questions; those of a question together and oldest first."""

    def ids(self) -> Iterable[str]:
        """Of every question that has an answer; some may come more than once."""

    def facts(self) -> Iterator[Facts]:
        """Of every answer; token ids and log-probs are not read where that can be avoided."""


class SegmentReader:
    """The experience of a checkpoint."""

    kind = "checkpoint"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group_size: int | None = read_summary(folder / SUMMARY_FILE).group_size

    def rows(self, only: Collection[str] | None = None) -> Iterator[Row]:
        manifest = self._manifest()
        begins, positions = _begins(manifest), _positions(manifest)
        chosen = (i for i, name in enumerate(manifest.question_ids) if only is None or name in only)
        # Shard by shard, as a run writes Parquet: another number of ranks can pass over what is not its.
        for question in sorted(chosen, key=lambda i: shard_of(manifest.question_ids[i])):
            name, bucket = manifest.question_ids[question], int(manifest.buckets[question])
            for place in range(int(begins[question]), int(begins[question + 1])):
                answer = decode(_record(manifest, place)).answer
                yield Row(name, bucket, int(positions[question]), place - int(begins[question]), answer)

    def ids(self) -> Iterable[str]:
        return self._manifest().question_ids

    def facts(self) -> Iterator[Facts]:
        manifest = self._manifest()
        opened = [_segment(manifest, place) for place in range(len(manifest.segments))]
        lengths, offsets = manifest.columns["length"], manifest.columns["offset"]
        for place, question in enumerate(manifest.question.tolist()):
            segment = opened[int(manifest.segment[place])]
            header = segment.read(int(offsets[place]), HEADER_BYTES)
            if len(header) < HEADER_BYTES:
                raise _damaged(segment.path, manifest.question_ids[question])
            step, num_tokens = facts_of(header)
            yield Facts(
                manifest.question_ids[question],
                int(manifest.buckets[question]),
                num_tokens,
                step,
                float(manifest.columns["entropy"][place]),
                int(lengths[place]),
            )

    def _manifest(self) -> Manifest:
        assert self.group_size is not None
        return read_manifest(self.folder, self.group_size)


class LiveReader:
    """What a run has in its segments that has no checkpoint yet, or was killed before it; answers that it dropped since
    are among them, and every question is in the bucket of one correct answer."""

    kind = "segments of a run without a checkpoint"
    group_size: int | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, only: Collection[str] | None = None) -> Iterator[Row]:
        try:
            recovery = Recovery(find_segments(self.folder))
        except FileNotFoundError as error:
            raise CheckpointError(f"{error.filename}: a run that is writing has just deleted it; try again") from error
        for position, (name, records) in enumerate(recovery.by_question()):
            if only is None or name in only:
                for index, record in enumerate(records):
                    yield Row(name, 1, position, index, record.answer)

    def ids(self) -> Iterable[str]:
        return (row.question_id for row in self.rows())

    def facts(self) -> Iterator[Facts]:
        return map(_facts, self.rows())


class ParquetReader:
    """Exported or saved Parquet, in one file or several."""

    kind = "Parquet"

    def __init__(self, path: Path) -> None:
        self.paths = find_answers_files(path)
        self.group_size: int | None = _recorded_group_size(self.paths[0])

    def rows(self, only: Collection[str] | None = None) -> Iterator[Row]:
        assert self.group_size is not None
        rows = iterate_rows(self.paths, self.group_size)
        return (row for row in rows if only is None or row.question_id in only)

    def ids(self) -> Iterable[str]:
        assert self.group_size is not None
        return question_ids(self.paths, self.group_size)

    def facts(self) -> Iterator[Facts]:
        return map(_facts, self.rows())


class JsonlReader:
    """Exported JSON lines; those of others too, whose rows need not stand together."""

    kind = "JSON lines"

    def __init__(self, path: Path) -> None:
        self.path = path
        place, first = next(read_rows(path), (f"{path}", None))
        if first is None:
            raise CheckpointError(f"{place}: has no rows")
        self._check = RowCheck(None)
        self._check.checked(place, first)
        self.group_size: int | None = self._check.group_size

    def rows(self, only: Collection[str] | None = None) -> Iterator[Row]:
        check = RowCheck(self.group_size)
        for place, values in read_rows(self.path):
            row = check.checked(place, values)
            if only is None or row.question_id in only:
                # Places in a file that anybody may have written are not relied on: `import` makes them anew.
                yield Row(row.question_id, row.bucket, 0, 0, row.answer)

    def ids(self) -> Iterable[str]:
        return (row.question_id for row in self.rows())

    def facts(self) -> Iterator[Facts]:
        return map(_facts, self.rows())


def _facts(row: Row) -> Facts:
    answer = row.answer
    entropy = -float(np.mean(answer.logprobs, dtype=np.float64))
    return Facts(row.question_id, row.bucket, len(answer.token_ids), answer.step, entropy, 0)


def _begins(manifest: Manifest) -> np.ndarray:
    """The place of each question's first answer, and the end."""
    return np.searchsorted(manifest.question, np.arange(len(manifest.question_ids) + 1))


def _positions(manifest: Manifest) -> np.ndarray:
    """Of each question in its bucket; the questions stand bucket by bucket, in this order."""
    return np.arange(len(manifest.buckets)) - np.searchsorted(manifest.buckets, manifest.buckets)


def _segment(manifest: Manifest, place: int) -> Segment:
    return Segment.existing(manifest.path(place), None, manifest.segments[place][1])


def _record(manifest: Manifest, place: int) -> bytes:
    segment = _segment(manifest, int(manifest.segment[place]))
    record = segment.read(int(manifest.columns["offset"][place]), int(manifest.columns["length"][place]))
    if not is_whole(record):
        raise _damaged(segment.path, manifest.question_ids[int(manifest.question[place])])
    return record


def _damaged(path: Path | None, question_id: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: an answer of question {question_id!r} is damaged or missing; `exgrpo experience verify` names all "
        "that is, and another checkpoint may have it"
    )


def _recorded_group_size(path: Path) -> int | None:
    try:
        recorded = (pq.read_schema(path).metadata or {}).get(GROUP_SIZE_KEY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as experience ({error})") from error
    if recorded is None:
        raise CheckpointError(
            f"{path}: Parquet that says no group size, and so not written by this program; `exgrpo experience import` "
            "makes it something a run can begin with"
        )
    size = int(recorded) if recorded.isdigit() and len(recorded) < 10 else 0
    if not 2 <= size <= LARGEST_GROUP:
        raise CheckpointError(f"{path}: its group size is {recorded!r}, not 2 to {LARGEST_GROUP}. {REMEDY}.")
    return size
