"""What was saved, as an index and a store of this process: from a checkpoint's segments, or from Parquet files."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.adding import add
from exgrpo_megatron.experience.answers import NOBODY, AnswerStore
from exgrpo_megatron.experience.encoding import is_whole, serial_of
from exgrpo_megatron.experience.files import SUMMARY_FILE, Summary, find_answers_files, read_summary
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.manifest import Manifest, find_index_files, read_manifest
from exgrpo_megatron.experience.partition import owner_of, shard_of
from exgrpo_megatron.experience.reading import Listing, read_answers, read_index
from exgrpo_megatron.experience.recovery import Recovery, find_segments
from exgrpo_megatron.experience.segments import Segment, checksum_of
from exgrpo_megatron.types import StoredAnswer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Whose answers are wanted."""

    rank: int
    num_ranks: int
    keeps: bool
    """False: another process keeps those of this rank."""

    def owns(self, question_id: str) -> bool:
        return self.keeps and (self.num_ranks == 1 or owner_of(shard_of(question_id), self.num_ranks) == self.rank)


@dataclass(frozen=True)
class Restored:
    """A buffer that was saved, as one process sees it."""

    index: QuestionIndex
    store: AnswerStore
    next_serial: int
    lost: Counter[str]
    """Answers of this process that are damaged, by question; the index still counts them."""


def restore(
    path: Path,
    index: QuestionIndex,
    owner: Owner,
    store: AnswerStore,
    on_corruption: Literal["refuse", "quarantine"],
) -> Restored:
    """Read the experience in a folder, or in one Parquet file, into an empty index and store: a checkpoint's, what was
    exported, or what a killed run left.

    Raises:
        CheckpointError: a file is missing, damaged or of another group size; names the file and the row or question.
    """
    if find_index_files(path):
        manifest = read_manifest(path, index.group_size)
        index.fill(manifest.question_ids, manifest.buckets, manifest.num_answers)
        lost = _take_segments(manifest, index, owner, store, on_corruption)
        return Restored(index, store, int(manifest.columns["serial"].astype(np.int64).max(initial=-1)) + 1, lost)
    segments = find_segments(path)
    if segments:
        return _from_killed_run(Recovery(segments), index, owner, store)
    return _from_parquet(find_answers_files(path), index, owner, store)


def check_agreement(folder: Path, restored: Restored) -> Summary:
    """All files must be of the same buffer, and no retired question may have answers; the summary's retired questions
    are entered into the index. Returns the summary.

    Raises:
        CheckpointError: they are not, or the summary is missing or damaged.
    """
    summary = read_summary(folder / SUMMARY_FILE)
    found = (len(restored.index), restored.index.total_answers)
    if found != (summary.num_questions, summary.num_answers):
        raise CheckpointError(
            f"{folder}: its files hold {found[0]} questions and {found[1]} answers, but {SUMMARY_FILE} says "
            f"{summary.num_questions} and {summary.num_answers}. Use another checkpoint."
        )
    for question_id in summary.retired:
        if question_id in restored.index:
            raise CheckpointError(
                f"{folder}: question {question_id!r} has answers, but is retired according to {SUMMARY_FILE}. Use "
                "another checkpoint."
            )
        restored.index.retire(question_id)
    return summary


def _from_killed_run(found: Recovery, index: QuestionIndex, owner: Owner, store: AnswerStore) -> Restored:
    """Nobody knows how often a question was answered correctly: it is in the bucket of one until a run has tried it."""
    counts = found.num_answers()
    next_serial = 0
    index.fill(list(counts), np.ones(len(counts), np.int64), np.array(list(counts.values()), np.int64))
    for record in found:
        next_serial = record.serial + 1
        if owner.owns(record.question_id):
            add(store, index.row(record.question_id), record.question_id, record.serial, record.answer)
    store.flush()
    return Restored(index, store, next_serial, Counter())


def _from_parquet(files: list[Path], index: QuestionIndex, owner: Owner, store: AnswerStore) -> Restored:
    listings = read_index(files, index.group_size)
    index.fill(
        [listing.question_id for listing in listings],
        np.array([listing.bucket for listing in listings], np.int64),
        np.array([listing.num_answers for listing in listings], np.int64),
    )
    serials = _serials(listings)
    firsts = np.cumsum([0, *(listing.num_answers for listing in listings)])

    def take(question_id: str, answer: StoredAnswer) -> bool:
        row = index.row(question_id)
        return add(store, row, question_id, int(serials[firsts[row] + len(store.slots(row))]), answer)

    read_answers(files, index.group_size, owner.owns, take)
    store.flush()
    return Restored(index, store, len(serials), Counter())


def _serials(listings: list[Listing]) -> NDArray[np.int64]:
    """Of every answer its place in the order of storing, as far as the steps tell."""
    steps = np.array([step for listing in listings for step in listing.steps], np.int64)
    serials = np.empty(len(steps), np.int64)
    serials[np.argsort(steps, kind="stable")] = np.arange(len(steps))
    return serials


def _take_segments(
    manifest: Manifest, index: QuestionIndex, owner: Owner, store: AnswerStore, on_corruption: str
) -> Counter[str]:
    """The owner's answers into the store; returns how many of each question are damaged."""
    if not owner.keeps:
        return Counter()
    mine = manifest.owned(index.ids, owner.rank, owner.num_ranks)
    numbers, damaged = np.full(len(manifest.segments), NOBODY, np.int64), []
    for place in np.unique(manifest.segment[mine]).tolist():
        _, sealed = manifest.segments[place]
        path = manifest.path(place)
        source = Segment.existing(path, None, sealed)
        if checksum_of(source) == sealed:
            numbers[place], segment = store.folder.adopt(path, sealed)
            store.take(int(numbers[place]), segment)
        elif on_corruption == "refuse":
            raise CheckpointError(
                f"{path}: {_what_is_wrong(path, sealed.size)}: use another checkpoint, or set experience.on_corruption "
                "to 'quarantine' to go on without its damaged answers"
            )
        else:
            damaged.append(place)
    good = mine & (numbers[manifest.segment] != NOBODY)
    columns = {name: values[good] for name, values in manifest.columns.items()}
    store.adopt(manifest.question[good], numbers[manifest.segment[good]], columns)
    return _rescue(manifest, mine, damaged, store)


def _what_is_wrong(path: Path, size: int) -> str:
    if not path.is_file():
        return "this segment of stored answers is missing"
    found = path.stat().st_size
    return "this segment of stored answers is damaged" + (f" ({found} of {size} bytes)" if found != size else "")


def _rescue(manifest: Manifest, mine: NDArray[np.bool_], damaged: list[int], store: AnswerStore) -> Counter[str]:
    """The sound answers of damaged segments into the store, in their places; returns what each question lost."""
    lost: Counter[str] = Counter()
    for place in damaged:
        _, sealed = manifest.segments[place]
        source = Segment.existing(manifest.path(place), None, sealed)
        before = lost.total()
        chosen = np.flatnonzero(mine & (manifest.segment == place))
        for question, answers in groupby(chosen.tolist(), key=lambda answer: int(manifest.question[answer])):
            found = {int(manifest.columns["serial"][answer]): _row(manifest, answer) for answer in answers}
            sound = {
                serial: (record, row)
                for serial, row in found.items()
                if is_whole(record := source.read(int(row["offset"]), int(row["length"])))
                and serial_of(record) == serial
            }
            _insert(store, question, sound)
            lost[manifest.question_ids[question]] += len(found) - len(sound)
        logger.warning(
            "%s: %s; %d of its %d answers are lost", manifest.path(place),
            _what_is_wrong(manifest.path(place), sealed.size), lost.total() - before, len(chosen),
        )  # fmt: skip
    store.flush()
    return +lost


def _row(manifest: Manifest, answer: int) -> dict[str, Any]:
    return {name: values[answer] for name, values in manifest.columns.items()}


def _insert(store: AnswerStore, question: int, sound: dict[int, tuple[bytes, dict[str, Any]]]) -> None:
    """Answers of a question among those it has already, oldest first."""
    for serial, (record, row) in sorted(sound.items()):
        values = {name: value for name, value in row.items() if name not in ("offset", "length")}
        before = [slot for slot in store.slots(question) if int(store.column("serial")[slot]) < serial]
        store.append(question, before[-1] if before else NOBODY, record, values)
