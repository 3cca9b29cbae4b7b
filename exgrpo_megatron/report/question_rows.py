"""What a report says of every question: from the run's history, or, where there is none, from its newest checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.files import SUMMARY_FILE, read_summary
from exgrpo_megatron.experience.history import FIELDS, Event, read_history
from exgrpo_megatron.experience.manifest import find_index_files, read_manifest
from exgrpo_megatron.types import Question

NEVER, UNSOLVED, UNSTORED, STORED, RETIRED = "not tried", "never right", "right, not stored", "in the buffer", "retired"
STATUSES = (NEVER, UNSOLVED, UNSTORED, STORED, RETIRED)


@dataclass
class QuestionRow:
    """One question and what became of it."""

    id: str
    question: Question | None = None
    """As it was written, where the question file is there."""
    groups: int = 0
    """Groups of answers sampled for it."""
    right: int = 0
    answers: int = 0
    """Of all groups, replayed ones included."""
    last: int | None = None
    """Correct in its latest group, or, without a history, its bucket."""
    first_step: int | None = None
    last_step: int | None = None
    """In which it was tried."""
    stored: int = 0
    """Stored answers now."""
    ever_stored: bool = False
    replays: int = 0
    evicted: int = 0
    ratio: float = math.nan
    """Mean w of its latest replay."""
    retired_step: int | None = None
    retired: bool = False
    events: list[list[Any]] = field(default_factory=list)
    """[step, kind's place in `FIELDS`, values...] each."""

    @property
    def status(self) -> str:
        if self.retired:
            return RETIRED
        if self.stored:
            return STORED
        if self.right:
            return UNSTORED
        return UNSOLVED if self.groups else NEVER

    def add(self, step: int, event: Event) -> None:
        """Take in the next event."""
        values = [getattr(event, name) for name in FIELDS[event.kind]]
        plain = [None if isinstance(value, float) and math.isnan(value) else value for value in values]
        self.events.append([step, list(FIELDS).index(event.kind), *plain])
        match event.kind:
            case "tried":
                self._tried(step, event)
            case "stored":
                self.stored += 1
            case "prefilled":
                self.stored += event.count
            case "lost":
                self.stored -= event.count
            case "evicted":
                self.stored -= 1
                self.evicted += 1
            case "replayed":
                self.replays += 1
                self.ratio = event.mean_ratio
            case "retired" | "returned":
                self.retired = event.kind == "retired"
                self.retired_step = step if self.retired else None
                self.stored = 0 if self.retired else self.stored

    def _tried(self, step: int, event: Event) -> None:
        self.groups += 1
        self.right += event.count
        self.answers += event.of
        self.last, self.last_step = event.count, step
        self.first_step = step if self.first_step is None else self.first_step


def rows_from_history(path: Path, known: Mapping[str, Question]) -> list[QuestionRow]:
    """A row a question: those of the data, then others that the history names; raises DataError for a damaged line."""
    rows = {name: QuestionRow(name, question) for name, question in known.items()}
    for step, events in read_history(path):
        for event in events:
            rows.setdefault(event.question_id, QuestionRow(event.question_id)).add(step, event)
    return list(rows.values())


def rows_from_checkpoint(folder: Path, group_size: int, known: Mapping[str, Question]) -> list[QuestionRow]:
    """Buckets, stored answers and retired questions as the checkpoint's `experience` folder has them.

    Raises:
        CheckpointError: it is damaged, or of a format without an index.
    """
    if not find_index_files(folder):
        raise CheckpointError(f"{folder}: no index of stored answers")
    manifest = read_manifest(folder, group_size)
    rows = {name: QuestionRow(name, question) for name, question in known.items()}
    listed = zip(manifest.question_ids, manifest.buckets.tolist(), manifest.num_answers.tolist(), strict=True)
    for name, bucket, count in listed:
        row = rows.setdefault(name, QuestionRow(name))
        row.last, row.stored = bucket, count
    for name in read_summary(folder / SUMMARY_FILE).retired:
        rows.setdefault(name, QuestionRow(name)).retired = True
    return list(rows.values())


def replayed_serials(rows: Iterable[QuestionRow]) -> list[int]:
    """Answers that were replayed, the latest replay first, each once."""
    replayed = list(FIELDS).index("replayed")
    found = [(event[0], event[2]) for row in rows for event in row.events if event[1] == replayed]
    return list(dict.fromkeys(serial for _, serial in sorted(found, key=lambda pair: -pair[0])))
