"""Reading what `snapshot` wrote: every question, and where the answers are that one process keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.answers import COLUMNS
from exgrpo_megatron.experience.files import GROUP_SIZE_KEY, REMEDY, numbered_files
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.partition import owner_of
from exgrpo_megatron.experience.segments import MAGIC, Sealed
from exgrpo_megatron.experience.snapshot import INDEX_FILE, INDEX_SCHEMA, SEGMENTS_FOLDER, SEGMENTS_KEY, index_file

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Manifest:
    """All index files of a checkpoint; the arrays have one entry a question, in the order that decides draws, or one
    an answer, those of a question together and oldest first."""

    folder: Path
    question_ids: list[str]
    buckets: Ints
    num_answers: Ints
    question: Ints
    """Of each answer, its question's place in `question_ids`."""
    segment: Ints
    """Of each answer, its segment's place in `segments`."""
    segments: list[tuple[str, Sealed]]
    columns: dict[str, NDArray[Any]]
    """The other columns, by answer."""

    def owned(self, ids: IdTable, rank: int, num_ranks: int) -> NDArray[np.bool_]:
        """Which answers a data-parallel rank owns; `ids` has the questions in the same order."""
        owners = owner_of(ids.shards(np.arange(len(self.question_ids))), num_ranks)
        return owners[self.question] == rank

    def path(self, segment: int) -> Path:
        return self.folder / SEGMENTS_FOLDER / self.segments[segment][0]


def find_index_files(folder: Path) -> list[Path]:
    """The index files of a checkpoint's experience; none where it is of an older format.

    Raises:
        CheckpointError: one of them is missing, or does not belong to the others, or is named itself.
    """
    if INDEX_FILE.fullmatch(folder.name) and folder.is_file():
        raise CheckpointError(
            f"{folder}: the index of a checkpoint's stored answers, which does not hold them: name its folder, "
            f"{folder.parent}"
        )
    return numbered_files(folder, INDEX_FILE, index_file) if folder.is_dir() else []


def read_manifest(folder: Path, group_size: int) -> Manifest:
    """Read and check every index file; segments are not read.

    Raises:
        CheckpointError: a file is unreadable or of another group size, or a row breaks a rule (it is named).
    """
    tables: list[dict[str, NDArray[Any]]] = []
    names: list[str] = []
    segments: list[tuple[str, Sealed]] = []
    for path in find_index_files(folder):
        table, listed = _read(path, group_size)
        values = {field.name: table.column(field.name).to_numpy() for field in list(INDEX_SCHEMA)[1:]}
        ids = table.column("question_id").combine_chunks()
        own = ids.dictionary.to_pylist()
        values["question"] = ids.indices.to_numpy() + len(names)
        _check_rows(path, values, own, listed, group_size)
        values["segment"] = values["segment"] + len(segments)
        tables.append(values)
        names += own
        segments += listed
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return _in_order(folder, joined, names, segments)


def _in_order(
    folder: Path, rows: dict[str, NDArray[Any]], names: list[str], segments: list[tuple[str, Sealed]]
) -> Manifest:
    """Questions by bucket and place, and answers by question; raises CheckpointError where a place is not due."""
    begins = np.flatnonzero(rows["answer_index"] == 0)
    buckets, positions = rows["bucket"][begins].astype(np.int64), rows["position"][begins].astype(np.int64)
    order = np.lexsort((positions, buckets))
    sorted_buckets = buckets[order]
    due = np.arange(len(order)) - np.searchsorted(sorted_buckets, sorted_buckets)
    wrong = np.flatnonzero(positions[order] != due)
    ids = [names[i] for i in rows["question"][begins][order].tolist()]
    if len(wrong) or len(set(ids)) != len(ids):
        what = f"question {ids[wrong[0]]!r} is not in its place" if len(wrong) else "a question stands there twice"
        raise CheckpointError(f"{folder}: {what} in the order of its bucket. {REMEDY}.")
    rank = np.empty(len(names), np.int64)
    rank[rows["question"][begins][order]] = np.arange(len(order))
    question = rank[rows["question"]]
    answers = np.lexsort((rows["answer_index"], question))
    return Manifest(
        folder=folder,
        question_ids=ids,
        buckets=sorted_buckets,
        num_answers=np.bincount(question, minlength=len(ids)),
        question=question[answers],
        segment=rows["segment"][answers].astype(np.int64),
        segments=segments,
        columns={name: rows[name][answers] for name in COLUMNS},
    )


def _read(path: Path, group_size: int) -> tuple[Any, list[tuple[str, Sealed]]]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {REMEDY}.") from error
    check_group_size(path, table.schema, group_size)
    try:
        listed = json.loads(table.schema.metadata[SEGMENTS_KEY])
        segments = [(str(name), Sealed(int(size), int(checksum))) for name, size, checksum in listed]
        if table.schema.remove_metadata() != INDEX_SCHEMA:
            raise ValueError("its columns are others")
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: no index of stored answers ({error}). {REMEDY}.") from error
    return table, segments


def check_group_size(path: Path, schema: Any, group_size: int) -> None:
    """Raises CheckpointError with both numbers where the file was written for groups of another size."""
    recorded = (schema.metadata or {}).get(GROUP_SIZE_KEY)
    if recorded != str(group_size).encode():
        found = "no group size" if recorded is None else f"groups of {recorded.decode(errors='replace')}"
        raise CheckpointError(
            f"{path}: written for {found}, but grpo.num_generations_per_prompt = {group_size} (a bucket is a number "
            "correct out of a group). Use experience of a run with the same group size, or set the key to it."
        )


def _check_rows(
    path: Path,
    rows: dict[str, NDArray[Any]],
    names: list[str],
    segments: list[tuple[str, Sealed]],
    group_size: int,
) -> None:
    """Raises CheckpointError that names the first row that breaks a rule."""
    question, first = rows["question"], rows["answer_index"] == 0
    begins = np.diff(question, prepend=-1) != 0
    due = np.arange(len(question)) - np.maximum.accumulate(np.where(begins, np.arange(len(question)), 0))
    sizes = np.array([sealed.size for _, sealed in segments], np.int64)
    number = rows["segment"]
    known = (number >= 0) & (number < len(segments))
    ends = rows["offset"].astype(np.int64) + rows["length"]
    same = np.ones(len(question), np.bool_)
    same[1:] = begins[1:] | ((np.diff(rows["bucket"]) == 0) & (np.diff(rows["position"]) == 0))
    rules: list[tuple[str, Callable[[], NDArray[np.bool_]]]] = [
        (f"bucket is not in 1..{group_size - 1}", lambda: (rows["bucket"] >= 1) & (rows["bucket"] < group_size)),
        ("answer_index is not the one that is due", lambda: rows["answer_index"] == due),
        ("bucket or position is another than in the row before", lambda: same),
        ("the segment is not listed", lambda: known),
        ("the answer lies outside of its segment", lambda: (rows["offset"] >= len(MAGIC)) & (ends <= sizes[number])),
    ]
    for rule, holds in rules:
        broken = np.flatnonzero(~holds())
        if len(broken):
            row = int(broken[0])
            raise CheckpointError(f"{path}: row {row}: {rule}. {REMEDY}.")
    if int(first.sum()) != len(names):
        raise CheckpointError(f"{path}: the rows of a question do not stand together. {REMEDY}.")
