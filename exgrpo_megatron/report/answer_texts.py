"""The texts of stored answers, read out of a run's checkpoints by their serials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exgrpo_megatron.checkpointing import STATE_FILE
from exgrpo_megatron.config import Config
from exgrpo_megatron.experience.encoding import Record, decode, is_whole
from exgrpo_megatron.experience.manifest import Manifest, find_index_files, read_manifest
from exgrpo_megatron.types import TokenIds


@dataclass(frozen=True)
class AnswerText:
    """A stored answer as text."""

    question_id: str
    text: str
    tokens: int
    stored_step: int
    mean_logprob: float


@dataclass(frozen=True)
class FoundTexts:
    """By serial, and how many of those looked for were damaged."""

    texts: dict[int, AnswerText]
    damaged: int


def experience_folders(run: Path, config: Config) -> list[Path]:
    """The stored answers of the run's whole checkpoints, newest first; a run's folder may have been moved."""
    own = run / "checkpoints"
    folder = Path(config.checkpointing.checkpoint_dir) if config.checkpointing.checkpoint_dir else own
    steps = [path.parent for path in folder.glob(f"step_*/{STATE_FILE}")] if folder.is_dir() else []
    found = [path / "experience" for path in sorted(steps, key=lambda path: path.name, reverse=True)]
    return [path for path in found if path.is_dir() and find_index_files(path)]


def answer_texts(
    folders: Iterable[Path], group_size: int, serials: Sequence[int], text_of: Callable[[TokenIds], str]
) -> FoundTexts:
    """Look for the answers in one checkpoint after the other, until all are found.

    Raises:
        CheckpointError: an index is damaged.
    """
    wanted, found, damaged = set(serials), dict[int, AnswerText](), 0
    for folder in folders:
        if not wanted:
            break
        records, bad = _records(read_manifest(folder, group_size), wanted)
        damaged += bad
        wanted -= records.keys()
        found |= {serial: _text(record, text_of) for serial, record in records.items()}
    return FoundTexts(found, damaged)


def _records(manifest: Manifest, wanted: set[int]) -> tuple[dict[int, Record], int]:
    """Those of the wanted answers that the checkpoint has, and how many of them are damaged."""
    columns = manifest.columns
    places = np.flatnonzero(np.isin(columns["serial"], np.fromiter(wanted, np.int64, len(wanted))))
    found, damaged = {}, 0
    for segment in np.unique(manifest.segment[places]).tolist():
        with manifest.path(segment).open("rb") as file:
            for place in places[manifest.segment[places] == segment].tolist():
                file.seek(int(columns["offset"][place]))
                data = file.read(int(columns["length"][place]))
                if is_whole(data):
                    record = decode(data)
                    found[record.serial] = record
                else:
                    damaged += 1
    return found, damaged


def _text(record: Record, text_of: Callable[[TokenIds], str]) -> AnswerText:
    answer = record.answer
    mean = float(np.mean(answer.logprobs, dtype=np.float64))
    return AnswerText(record.question_id, text_of(answer.token_ids), len(answer.token_ids), answer.step, mean)
