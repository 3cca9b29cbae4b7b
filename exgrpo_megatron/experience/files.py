"""Experience for others to read: a Parquet file a data-parallel rank, one row a stored answer, and a small JSON beside
them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.types import StoredAnswer

SUMMARY_FILE = "experience.json"
SINGLE_FILE = "experience.parquet"
"""All answers in format 1, whose rows have no position: it is that of the rows themselves."""
FORMAT = 2
READABLE_FORMATS = (1, FORMAT, 3)
"""Format 3 is that of checkpoints (`snapshot`), which share the summary only."""

GROUP_SIZE_KEY, FORMAT_KEY = b"exgrpo.group_size", b"exgrpo.format"
"""In the files' metadata; format 1 has the first only."""
ROWS_AT_ONCE = 1024
"""Rows of a row group: a reader passes over those in which it owns nothing."""
REMEDY = "The file is damaged or was changed by hand: use another checkpoint, or an unchanged copy"
SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("answer_index", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
    ]
)
_ANSWERS_FILE = re.compile(r"answers-(\d{5})-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Row:
    """One stored answer as it stands in the file."""

    question_id: str
    bucket: int
    """k of K when the question was last tried; the same in every row of a question."""
    position: int
    """0, 1, ... in the list of its bucket, over all files; the same in every row of a question."""
    answer_index: int
    """0, 1, ... among the answers of the question, whose rows stand together."""
    answer: StoredAnswer


@dataclass(frozen=True)
class VocabularyName:
    """Which vocabulary token ids are of."""

    name: str
    vocab_size: int
    fingerprint: str
    """Equal for equal tokens with equal ids only."""

    def __str__(self) -> str:
        return f"{self.name} ({self.vocab_size} tokens, fingerprint {self.fingerprint})"


@dataclass(frozen=True)
class Summary:
    """What the Parquet files do not hold, and what they must agree with."""

    group_size: int
    num_questions: int
    num_answers: int
    retired: tuple[str, ...]
    num_damaged: int = 0
    """Answers that the run has lost to damaged files."""
    next_serial: int = 0
    """Correct answers that the run has met; 0 in formats without serials."""
    tokenizer: VocabularyName | None = None
    """Whose ids the tokens are; None: the files do not say (a checkpoint has its recipe beside it)."""


def answers_file(rank: int, num_ranks: int) -> str:
    """Name of the file of one data-parallel rank."""
    return f"answers-{rank:05d}-of-{num_ranks:05d}.parquet"


def find_answers_files(path: Path) -> list[Path]:
    """The files that hold the answers of one buffer: those in a folder, or the one that is named.

    Raises:
        CheckpointError: there are none, one of them is missing, or the named one holds a part of the answers only.
    """
    if not path.is_dir():
        named = _ANSWERS_FILE.fullmatch(path.name)
        if named and int(named[2]) > 1:
            raise CheckpointError(f"{path}: one of {int(named[2])} files that belong together: name their folder.")
        return [path]
    found = numbered_files(path, _ANSWERS_FILE, answers_file)
    if not found and (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    if not found:
        raise CheckpointError(
            f"{path}: holds no experience: neither {answers_file(0, 1)} nor one of more such files "
            "(`exgrpo experience import` makes these of JSON lines or other Parquet)."
        )
    return found


def numbered_files(folder: Path, pattern: re.Pattern[str], name: Callable[[int, int], str]) -> list[Path]:
    """The files of a folder that are numbered `name(rank, ranks)`, which `pattern` takes apart; there may be none.

    Raises:
        CheckpointError: one of them is missing, or does not belong to the others.
    """
    found = {file.name: int(match[2]) for file in folder.iterdir() if (match := pattern.fullmatch(file.name))}
    expected = [name(rank, max(found.values())) for rank in range(max(found.values(), default=0))]
    strange = sorted(found.keys() ^ set(expected))
    if strange:
        what = "belongs to another save than the files" if strange[0] in found else "is missing"
        raise CheckpointError(f"{folder / strange[0]} {what} beside it. {REMEDY}.")
    return [folder / expected_name for expected_name in expected]


def write_answers(
    path: Path, rows: Iterable[Row], group_size: int, texts: Mapping[str, Callable[[Row], str | None]] | None = None
) -> None:
    """Write rows some at a time, with page checksums. The order of the rows is kept. `texts`: further columns, which a
    run passes over."""
    texts = texts or {}
    schema = pa.schema([*SCHEMA, *(pa.field(name, pa.string()) for name in texts)])
    schema = schema.with_metadata({GROUP_SIZE_KEY: str(group_size).encode(), FORMAT_KEY: str(FORMAT).encode()})
    remaining = iter(rows)
    options = {"compression": "zstd", "use_dictionary": ["question_id"], "write_page_checksum": True}
    with pq.ParquetWriter(path, schema, **options) as writer:
        while batch := list(islice(remaining, ROWS_AT_ONCE)):
            writer.write_batch(_record_batch(batch, schema, list(texts.values())))


def write_summary(path: Path, summary: Summary, file_format: int = FORMAT) -> None:
    content: dict[str, Any] = {
        "format": file_format,
        "group_size": summary.group_size,
        "num_questions": summary.num_questions,
        "num_answers": summary.num_answers,
        "num_damaged": summary.num_damaged,
        "next_serial": summary.next_serial,
        "retired": list(summary.retired),
        **({"tokenizer": asdict(summary.tokenizer)} if summary.tokenizer else {}),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """Raises CheckpointError where the file is missing, not JSON, of another format, or has a wrong field."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found. It stands beside the answers in every checkpoint.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {REMEDY}.") from error
    if not isinstance(content, dict) or content.get("format") not in READABLE_FORMATS:
        raise CheckpointError(f"{path}: this is not an experience summary of format 1, 2 or 3. {REMEDY}.")
    retired = content.get("retired")
    if not isinstance(retired, list) or not all(isinstance(name, str) for name in retired):
        raise CheckpointError(f"{path}: `retired` must be a list of question ids. {REMEDY}.")
    return Summary(
        group_size=_whole_number(path, content, "group_size"),
        num_questions=_whole_number(path, content, "num_questions"),
        num_answers=_whole_number(path, content, "num_answers"),
        retired=tuple(retired),
        num_damaged=_whole_number(path, {"num_damaged": 0, **content}, "num_damaged"),
        next_serial=_whole_number(path, {"next_serial": 0, **content}, "next_serial"),
        tokenizer=_vocabulary_name(path, content),
    )


def _vocabulary_name(path: Path, content: dict[str, Any]) -> VocabularyName | None:
    found = content.get("tokenizer")
    try:
        return None if found is None else VocabularyName(**found)
    except TypeError:
        raise CheckpointError(f"{path}: `tokenizer` must have name, vocab_size and fingerprint. {REMEDY}.") from None


def _whole_number(path: Path, content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{path}: `{name}` must be a whole number, found {value!r}. {REMEDY}.")
    return value


def _record_batch(rows: Sequence[Row], schema: Any, texts: Sequence[Callable[[Row], str | None]]) -> Any:
    answers = [row.answer for row in rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(answer.token_ids) for answer in answers], out=offsets[1:])
    columns = [
        pa.array([row.question_id for row in rows], pa.string()),
        pa.array([row.bucket for row in rows], pa.int32()),
        pa.array([row.position for row in rows], pa.int32()),
        pa.array([row.answer_index for row in rows], pa.int32()),
        pa.ListArray.from_arrays(offsets, np.concatenate([answer.token_ids for answer in answers])),
        pa.ListArray.from_arrays(offsets, np.concatenate([answer.logprobs for answer in answers])),
        pa.array([answer.policy_version for answer in answers], pa.int64()),
        pa.array([answer.step for answer in answers], pa.int64()),
        *(pa.array([text(row) for row in rows], pa.string()) for text in texts),
    ]
    return pa.record_batch(columns, schema=schema)
