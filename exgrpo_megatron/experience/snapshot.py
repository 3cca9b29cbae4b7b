"""Experience in a checkpoint: links to the sealed segments, and an index file a data-parallel rank that says where in
them the answers are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from exgrpo_megatron.experience.answers import COLUMNS, AnswerStore
from exgrpo_megatron.experience.files import FORMAT_KEY, GROUP_SIZE_KEY, SUMMARY_FILE, Summary, write_summary
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.segments import Segment
from exgrpo_megatron.experience.stats_file import STATS_FILE, StatsSnapshot

SEGMENT_FORMAT = 3
SEGMENTS_FOLDER = "segments"
SEGMENTS_KEY = b"exgrpo.segments"
"""In an index file's metadata: name, size and checksum of every segment its rows point into, as JSON."""
INDEX_FILE = re.compile(r"index-(\d{5})-of-(\d{5})\.parquet")
INDEX_SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("answer_index", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("offset", pa.uint32(), nullable=False),
        pa.field("length", pa.uint32(), nullable=False),
        pa.field("fingerprint", pa.uint32(), nullable=False),
        pa.field("serial", pa.uint32(), nullable=False),
        pa.field("used", pa.int32(), nullable=False),
        pa.field("entropy", pa.float32(), nullable=False),
    ]
)


@dataclass(frozen=True)
class CheckpointSnapshot:
    """What one process writes of a buffer as it was at one moment."""

    group_size: int
    rank: int
    num_ranks: int
    summary: Summary | None
    """On the one process that writes it."""
    answers: AnswersSnapshot | None
    """None where another process keeps this rank's answers."""
    stats: StatsSnapshot | None = None
    """On the process that writes the summary."""

    def save(self, folder: Path) -> list[Path]:
        """Write this process's files into `folder`, which is made if need be, and return them; in any thread, once."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        if self.answers is not None:
            written += self.answers.save(folder, self.rank, self.num_ranks, self.group_size)
        if self.summary is not None:
            write_summary(folder / SUMMARY_FILE, self.summary, SEGMENT_FORMAT)
            written.append(folder / SUMMARY_FILE)
        if self.stats is not None:
            self.stats.save(folder / STATS_FILE)
            written.append(folder / STATS_FILE)
        return written


class AnswersSnapshot:
    """The table of a store's answers, copied, and its segments, sealed and kept until they are linked."""

    def __init__(self, store: AnswerStore, index: QuestionIndex) -> None:
        store.seal()
        live = store.live()
        order = live[np.lexsort((store.column("serial")[live], store.column("question")[live]))]
        self._questions = store.column("question")[order].astype(np.int64)
        self._places = index.places(self._questions)
        self._numbers = store.column("segment")[order]
        self._columns = {name: store.column(name)[order] for name in COLUMNS}
        self._ids = index.ids
        self._segments = {number: store.segments[number] for number in np.unique(self._numbers).tolist()}
        for segment in self._segments.values():
            segment.pin()

    def save(self, folder: Path, rank: int, num_ranks: int, group_size: int) -> list[Path]:
        try:
            links = self._link(folder / SEGMENTS_FOLDER, rank)
        finally:
            for segment in self._segments.values():
                segment.unpin()
        path = folder / index_file(rank, num_ranks)
        listed = [[link.name, segment.size, segment.checksum] for link, segment in links]
        metadata = {
            GROUP_SIZE_KEY: str(group_size).encode(),
            FORMAT_KEY: str(SEGMENT_FORMAT).encode(),
            SEGMENTS_KEY: json.dumps(listed).encode(),
        }
        table = pa.table(self._arrays(), schema=INDEX_SCHEMA.with_metadata(metadata))
        pq.write_table(table, path, compression="zstd", write_page_checksum=True)
        return [*(link for link, _ in links), path]

    def _link(self, folder: Path, rank: int) -> list[tuple[Path, Segment]]:
        folder.mkdir(exist_ok=True)
        links = []
        for place, segment in enumerate(self._segments.values()):
            links.append((folder / f"{rank:05d}-{place:06d}.seg", segment))
            segment.put_into(links[-1][0])
        return links

    def _arrays(self) -> list[Any]:
        rows, begins, which = np.unique(self._questions, return_index=True, return_inverse=True)
        names = pa.array(_names(self._ids, rows), pa.string())
        answer_index = np.arange(len(self._questions)) - begins[which] if len(rows) else np.zeros(0, np.int64)
        segment = np.searchsorted(np.array(list(self._segments), np.int64), self._numbers)
        whole = {
            "bucket": self._places[0], "position": self._places[1], "answer_index": answer_index, "segment": segment,
            **self._columns,
        }  # fmt: skip
        columns = [pa.array(whole[field.name], field.type) for field in list(INDEX_SCHEMA)[1:]]
        return [pa.DictionaryArray.from_arrays(pa.array(which, pa.int32()), names), *columns]


def index_file(rank: int, num_ranks: int) -> str:
    """Name of the index file of one data-parallel rank."""
    return f"index-{rank:05d}-of-{num_ranks:05d}.parquet"


def _names(ids: IdTable, rows: NDArray[np.int64]) -> list[str]:
    return [ids.name(row) for row in rows.tolist()]
