"""Whether stored experience is what was written: every record, the index against the segments, counts, the history."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from exgrpo_megatron.checkpointing import DIGESTS_FILE
from exgrpo_megatron.errors import CheckpointError, DataError
from exgrpo_megatron.experience.encoding import HEADER_BYTES, Record, decode, is_whole, may_be_headers
from exgrpo_megatron.experience.files import SUMMARY_FILE, Summary, find_answers_files, read_summary
from exgrpo_megatron.experience.history import read_history
from exgrpo_megatron.experience.manifest import Manifest, find_index_files, read_manifest
from exgrpo_megatron.experience.reading import iterate_rows, read_index
from exgrpo_megatron.experience.recovery import find_segments
from exgrpo_megatron.experience.segments import MAGIC, Segment, checksum_of, open_unsealed, scan
from exgrpo_megatron.experience_tools.readers import ParquetReader
from exgrpo_megatron.experience_tools.rows import RowCheck, is_jsonl, read_rows
from exgrpo_megatron.experience_tools.sources import Source
from exgrpo_megatron.experience_tools.sums import SUMS_FILE, read_sums
from exgrpo_megatron.files import sha256_of

_PIECE_BYTES = 1 << 20


@dataclass
class Verification:
    """What was looked at, and what is wrong."""

    source: Source
    questions: int = 0
    answers: int = 0
    segments: int = 0
    steps: int = 0
    """Of the history."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is strange, but to be expected of a run that was killed or is writing."""

    def describe(self) -> str:
        """One line for people."""
        what = f"{self.answers} answers of {self.questions} questions"
        what += f" in {self.segments} segments" if self.segments else ""
        what += f", a history of {self.steps} steps" if self.steps else ""
        return f"{self.source.path}: {what}: " + (f"{len(self.faults)} faults" if self.faults else "sound")


def verify(source: Source) -> Verification:
    """Read every byte of it; nothing is raised for what is wrong."""
    found = Verification(source)
    try:
        found.faults += _answer_faults(source, found)
    except (CheckpointError, DataError) as error:
        found.faults.append(str(error))
    if source.checkpoint is not None:
        found.faults += _changed_files(source.checkpoint)
    if source.history is not None:
        try:
            found.steps = sum(1 for _ in read_history(source.history))
        except DataError as error:
            found.faults.append(str(error))
    return found


def _answer_faults(source: Source, found: Verification) -> Iterator[str]:
    if find_index_files(source.path):
        yield from _checkpoint_faults(source.path, found)
    elif segments := find_segments(source.path):
        _check_live(segments, found)
    elif is_jsonl(source.path):
        yield from _jsonl_faults(source.path, found)
    else:
        yield from _parquet_faults(source.path, found)
    if source.checkpoint is None and (source.path / SUMMARY_FILE).is_file():
        yield from _sum_faults(source.path, found)


def _checkpoint_faults(folder: Path, found: Verification) -> Iterator[str]:
    summary = read_summary(folder / SUMMARY_FILE)
    manifest = read_manifest(folder, summary.group_size)
    found.questions, found.answers = len(manifest.question_ids), len(manifest.question)
    found.segments = len(manifest.segments)
    yield from _count_faults(folder, summary, manifest.question_ids, found.answers)
    for place, (_, sealed) in enumerate(manifest.segments):
        path = manifest.path(place)
        if not path.is_file():
            lost = int((manifest.segment == place).sum())
            yield f"{path}: missing, with {lost} answers"
            continue
        segment = Segment.existing(path, None, sealed)
        actual = checksum_of(segment)
        if actual.size != sealed.size:
            yield f"{path}: has {actual.size} bytes, and {sealed.size} by the index"
        bad = list(_segment_faults(manifest, place, segment))
        yield from bad
        if not bad and actual.size == sealed.size and actual != sealed:
            yield f"{path}: its checksum is not that of the index, though every answer in use is sound"
    listed = {name for name, _ in manifest.segments}
    for path in sorted((folder / "segments").glob("*")):
        if path.name not in listed:
            yield f"{path}: belongs to no index"


def _changed_files(checkpoint: Path) -> Iterator[str]:
    """The other files of the experience, by the SHA-256 that the checkpoint has of them."""
    try:
        saved = dict(json.loads((checkpoint / DIGESTS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        yield f"{checkpoint / DIGESTS_FILE}: cannot be read ({error})"
        return
    folder = checkpoint / "experience"
    there = {f"{path.relative_to(checkpoint)}" for path in folder.rglob("*") if path.is_file()}
    for name in sorted(there - saved.keys()):
        yield f"{checkpoint / DIGESTS_FILE}: has no SHA-256 of {name}"
    for name, digest in sorted(saved.items()):
        path = checkpoint / name
        if path.parent != folder:
            continue
        if not path.is_file():
            yield f"{path}: missing"
        elif sha256_of(path) != digest:
            yield f"{path}: is not as it was saved (its SHA-256 differs)"


def _sum_faults(folder: Path, found: Verification) -> Iterator[str]:
    """Of an exported folder whose files have their SHA-256 beside them."""
    path = folder / SUMS_FILE
    if not path.is_file():
        found.notes.append(f"{path}: not there, so that a changed number may pass unseen")
        return
    saved = read_sums(path)
    for name in sorted({file.name for file in folder.iterdir()} - saved.keys() - {SUMS_FILE}):
        yield f"{path}: has no SHA-256 of {name}"
    for name, digest in saved.items():
        if not (folder / name).is_file():
            yield f"{folder / name}: missing"
        elif sha256_of(folder / name) != digest:
            yield f"{folder / name}: is not as it was written (its SHA-256 differs)"


def _segment_faults(manifest: Manifest, place: int, segment: Segment) -> Iterator[str]:
    """Of the records that the index has in a segment, in the order in which they stand there."""
    mine = np.flatnonzero(manifest.segment == place)
    for answer in mine[np.argsort(manifest.columns["offset"][mine])].tolist():
        values = {name: column[answer] for name, column in manifest.columns.items()}
        name = manifest.question_ids[int(manifest.question[answer])]
        fault = _record_fault(segment.read(int(values["offset"]), int(values["length"])), name, values)
        if fault:
            where = f"byte {values['offset']} to {int(values['offset']) + int(values['length'])}"
            yield f"{segment.path}: {where}, answer {values['serial']} of question {name!r}: {fault}"


def _record_fault(data: bytes, question_id: str, values: dict[str, Any]) -> str | None:
    if not is_whole(data):
        return "damaged: its checksum does not hold"
    record = _decoded(data)
    if record is None:
        return "cannot be decoded although its checksum holds"
    ids = record.answer.token_ids.astype(np.int32).tobytes()
    entropy = -float(np.mean(record.answer.logprobs, dtype=np.float64))
    wrong = {
        "serial": record.serial != int(values["serial"]),
        "question": record.question_id != question_id,
        "checksum of token ids": zlib.crc32(ids) != int(values["fingerprint"]),
        # The index has the mean of the log-probs before they were rounded to 2^-20.
        "mean log-prob": abs(entropy - float(values["entropy"])) > 1e-5 * max(1.0, abs(entropy)),
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    return f"the index and the answer differ in {', '.join(found)}" if found else None


def _decoded(data: bytes) -> Record | None:
    try:
        return decode(data)
    except (pa.ArrowException, ValueError, OSError):
        return None


def _count_faults(folder: Path, summary: Summary, ids: Iterable[str], answers: int) -> Iterator[str]:
    names = set(ids)
    if (len(names), answers) != (summary.num_questions, summary.num_answers):
        yield (
            f"{folder / SUMMARY_FILE}: says {summary.num_questions} questions and {summary.num_answers} answers, but "
            f"there are {len(names)} and {answers}"
        )
    for name in sorted(names & set(summary.retired)):
        yield f"{folder / SUMMARY_FILE}: question {name!r} is retired, but has answers"


def _check_live(paths: list[Path], found: Verification) -> None:
    """Segments of a run that may be writing: only the last record of a file may be cut off."""
    names = set()
    found.segments = len(paths)
    for path in paths:
        segment = open_unsealed(path)
        if segment.read(0, len(MAGIC)) != MAGIC:
            found.faults.append(f"{path}: does not begin as a segment does")
            continue
        end = len(MAGIC)
        for offset, data in scan(segment):
            record = _decoded(data) if is_whole(data) else None
            end = offset + len(data)
            if record is None:
                found.faults.append(f"{path}: byte {offset} to {end}: damaged: its checksum does not hold")
                continue
            names.add(record.question_id)
            found.answers += 1
        following = _first_whole(segment, end)
        if following is not None:
            found.faults.append(f"{path}: byte {end} to {following}: damaged, with whole answers behind it")
        elif end < segment.size:
            found.notes.append(f"{path}: breaks off after {end} of {segment.size} bytes")
    found.questions = len(names)


def _first_whole(segment: Segment, begin: int) -> int | None:
    """Offset of the first whole record at or behind `begin`, wherever it stands."""
    for start in range(begin, segment.size - HEADER_BYTES + 1, _PIECE_BYTES):
        piece = np.frombuffer(segment.read(start, _PIECE_BYTES + HEADER_BYTES - 1), np.uint8)
        count = len(piece) - HEADER_BYTES + 1
        if count < 1:
            return None
        fields = np.lib.stride_tricks.sliding_window_view(piece, HEADER_BYTES)
        lengths = np.ascontiguousarray(fields[:, 4:8]).view("<u4")[:, 0].astype(np.int64)
        fits = (lengths > 0) & (start + np.arange(count) + HEADER_BYTES + lengths <= segment.size)
        for place in np.flatnonzero(fits & may_be_headers(fields)).tolist():
            if is_whole(segment.read(start + place, HEADER_BYTES + int(lengths[place]))):
                return start + place
    return None


def _parquet_faults(folder: Path, found: Verification) -> Iterator[str]:
    group_size = ParquetReader(folder).group_size
    assert group_size is not None
    files = find_answers_files(folder)
    listings = read_index(files, group_size)
    found.questions = len(listings)
    seen: set[tuple[str, int]] = set()
    for row in iterate_rows(files, group_size):
        found.answers += 1
        key = row.question_id, zlib.crc32(row.answer.token_ids.tobytes())
        if key in seen:
            yield f"{folder}: question {row.question_id!r}, answer {row.answer_index}: its token ids stand there twice"
        seen.add(key)
    beside = folder / SUMMARY_FILE
    if folder.is_dir() and beside.is_file():
        yield from _count_faults(folder, read_summary(beside), (one.question_id for one in listings), found.answers)


def _jsonl_faults(path: Path, found: Verification) -> Iterator[str]:
    check, names = RowCheck(None), set()
    for place, values in read_rows(path):
        try:
            row = check.checked(place, values)
        except DataError as error:
            yield str(error)
            continue
        names.add(row.question_id)
        found.answers += 1
    found.questions = len(names)
    if path.is_dir() and (path / SUMMARY_FILE).is_file():
        yield from _count_faults(path, read_summary(path / SUMMARY_FILE), names, found.answers)
