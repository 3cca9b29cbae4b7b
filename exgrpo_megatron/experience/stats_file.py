"""Statistics of questions in a checkpoint: one Parquet file, a row a question, the same whoever writes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.files import REMEDY
from exgrpo_megatron.experience.index import QuestionIndex
from exgrpo_megatron.experience.question_stats import QuestionStats, StatsKept

logger = logging.getLogger(__name__)

STATS_FILE = "questions.parquet"
_WINDOW_KEY = b"exgrpo.window"
"""In the file's metadata: of how many attempts results were kept."""
_TYPES = {
    name: pa.from_numpy_dtype(kind) for name, kind in StatsKept(0.0, 1, rewards=True).types.items() if name != "results"
}


class StatsSnapshot:
    """The statistics of one moment, copied."""

    def __init__(self, stats: QuestionStats) -> None:
        self._rows = stats.known_rows()
        self._kept, self._ids = stats.kept, stats.ids
        self._columns = {name: stats.column(name, self._rows) for name in stats.kept.types}

    def save(self, path: Path) -> None:
        arrays = {"question_id": pa.array([self._ids.name(row) for row in self._rows.tolist()], pa.string())}
        arrays |= {name: _as_arrow(values) for name, values in self._columns.items()}
        table = pa.table(arrays).replace_schema_metadata({_WINDOW_KEY: str(self._kept.window)})
        pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def read_stats(path: Path, kept: StatsKept, index: QuestionIndex, *, say: bool) -> QuestionStats:
    """The statistics that were saved, for the questions of `index`, to which those that are not stored are added.

    What the file has not, or the whole file in checkpoints that are older, begins anew; `say`: a warning says so.

    Raises:
        CheckpointError: the file cannot be read, or a row breaks a rule (it is named).
    """
    stats = QuestionStats(kept, index.ids)
    if not path.exists():
        if say:
            logger.warning("%s: this checkpoint has no statistics of questions: they begin anew", path)
        return stats
    table, window = _read(path)
    names = table.column("question_id").to_pylist()
    rows = np.array([index.row(name) for name in names], np.int64)
    if len(rows):
        stats.reach(int(rows.max()))
    found = {name: table.column(name) for name in kept.types if name in table.column_names}
    _check_types(path, found)
    for name, column in found.items():
        if name not in ("results", "known", "right"):
            stats.put(name, rows, column.to_numpy())
    if kept.window and window:
        _put_results(stats, rows, found, window)
    missing = sorted(kept.types.keys() - found.keys())
    if missing and say:
        logger.warning("%s: no %s of questions: they begin anew", path, ", ".join(missing))
    return stats


def _put_results(stats: QuestionStats, rows: NDArray[np.int64], found: dict[str, Any], window: int) -> None:
    """As many of the newest as both windows have."""
    size = min(stats.kept.window, window)
    mask, length = (1 << size) - 1, stats.kept.window_bytes
    bits = [int.from_bytes(value, "little") & mask for value in found["results"].to_pylist()]
    stats.put("results", rows, np.array([np.void(value.to_bytes(length, "little")) for value in bits], f"V{length}"))
    stats.put("known", rows, np.minimum(found["known"].to_numpy(), size))
    stats.put("right", rows, np.array([value.bit_count() for value in bits], np.uint8))


def _read(path: Path) -> tuple[Any, int]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        window = int(table.schema.metadata[_WINDOW_KEY])
        names = table.column("question_id").to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as statistics of questions ({error}). {REMEDY}.") from error
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise CheckpointError(f"{path}: question {twice!r} stands there twice. {REMEDY}.")
    empty = [name for name in table.column_names if table.column(name).null_count]
    if empty:
        raise CheckpointError(f"{path}: `{empty[0]}` is empty in a row. {REMEDY}.")
    return table, window


def _check_types(path: Path, found: dict[str, Any]) -> None:
    for name, column in found.items():
        whole = pa.types.is_fixed_size_binary(column.type) if name == "results" else column.type == _TYPES[name]
        if not whole:
            raise CheckpointError(f"{path}: column `{name}` is of type {column.type}. {REMEDY}.")


def _as_arrow(values: NDArray[np.generic]) -> Any:
    if values.dtype.kind == "V":
        return pa.array([value.tobytes() for value in values], pa.binary(values.dtype.itemsize))
    return pa.array(values)
