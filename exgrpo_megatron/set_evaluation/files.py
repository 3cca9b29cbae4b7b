"""The files of one question set in an evaluation: what its answers are of, and the answers written down so far."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.recipe import changed_keys
from exgrpo_megatron.set_answers import AnswerRow


@dataclass(frozen=True)
class Progress:
    """How far the evaluation of a set has come."""

    begun: bool
    done: frozenset[str]
    """Ids of the questions whose answers are all there."""
    dropped: int
    """Answers of a question that was not finished, and a line cut off in the middle: they are sampled again."""


class SetFiles:
    """`<name>.json`, which says what the answers are of, and `<name>.generations.jsonl`. For the main process alone."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.record_path = folder / f"{name}.json"
        self.answers_path = folder / f"{name}.generations.jsonl"

    def progress(self, identity: dict[str, Any], question_ids: Sequence[str], num_samples: int) -> Progress:
        """What is there; answers of unfinished questions are removed from the file.

        Raises:
            CheckpointError: the answers are of another checkpoint, question set, setting or version than `identity`
                says, or the files are damaged.
        """
        if not self.record_path.exists():
            if self.answers_path.exists():
                raise CheckpointError(
                    f"{self.answers_path}: no {self.record_path.name} says of what these answers are; {self._advice}"
                )
            return Progress(False, frozenset(), 0)
        # Both through JSON: of a tuple nothing but its list is on disk.
        changes = changed_keys(self.record()["identity"], json.loads(json.dumps(identity)))
        if changes:
            raise CheckpointError(
                f"{self.record_path}: the answers there are of another evaluation ({'; '.join(changes)}), and are not "
                f"mixed with new ones; {self._advice}"
            )
        rows, torn = self._whole_rows()
        groups = self._by_question(rows, question_ids)
        done = frozenset(name for name, group in groups.items() if _is_whole(group, num_samples))
        kept = [row for row in rows if row["question_id"] in done]
        dropped = len(rows) - len(kept) + torn
        if dropped:
            replace_text(self.answers_path, _lines(kept))
        return Progress(True, done, dropped)

    def begin(self, record: dict[str, Any]) -> None:
        """Note what the answers will be of: `record["identity"]`, and what else is to be kept beside it."""
        replace_text(self.record_path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        self.answers_path.touch()

    def record(self) -> dict[str, Any]:
        """What `begin` noted; raises CheckpointError where it is damaged."""
        try:
            content = json.loads(self.record_path.read_text(encoding="utf-8"))
            if not isinstance(content["identity"], dict):
                raise TypeError("identity is no object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.record_path} cannot be read: {error!r}; {self._advice}") from error
        return content

    def append(self, rows: Sequence[AnswerRow]) -> None:
        """Answers of whole questions; on disk when this returns. Raises UserError where they cannot be written."""
        try:
            with self.answers_path.open("a", encoding="utf-8") as file:
                file.write(_lines(rows))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.answers_path}: {error.strerror}; make room, then run again") from error

    def answers(self, question_ids: Sequence[str]) -> list[list[AnswerRow]]:
        """The answers written down, question by question in the order of `question_ids`, each by its sample."""
        groups = self._by_question(self._whole_rows()[0], question_ids)
        return [sorted(groups[name], key=lambda row: row["sample"]) for name in question_ids]

    @property
    def _advice(self) -> str:
        return f"move the folder {self.folder} away to evaluate anew, or set back what changed"

    def _whole_rows(self) -> tuple[list[AnswerRow], int]:
        """The rows, and 1 where the last line was cut off while it was written."""
        try:
            lines = self.answers_path.read_bytes().split(b"\n") if self.answers_path.exists() else [b""]
            return [_row(line) for line in lines[:-1]], int(lines[-1] != b"")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.answers_path} is damaged: {error!r}; {self._advice}") from error

    def _by_question(self, rows: Sequence[AnswerRow], question_ids: Sequence[str]) -> dict[str, list[AnswerRow]]:
        groups: dict[str, list[AnswerRow]] = {name: [] for name in question_ids}
        for row in rows:
            if row["question_id"] not in groups:
                raise CheckpointError(
                    f"{self.answers_path}: no question of the set has the id {row['question_id']!r}; {self._advice}"
                )
            groups[row["question_id"]].append(row)
        return groups


def _row(line: bytes) -> AnswerRow:
    row = json.loads(line)
    for name, kind in (("question_id", str), ("sample", int), ("correct", bool), ("num_tokens", int)):
        if not isinstance(row[name], kind):
            raise TypeError(f"{name} = {row[name]!r}")
    return row


def _is_whole(group: list[AnswerRow], num_samples: int) -> bool:
    return sorted(row["sample"] for row in group) == list(range(num_samples))


def _lines(rows: Sequence[AnswerRow]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
