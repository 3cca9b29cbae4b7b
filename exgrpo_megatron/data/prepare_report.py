"""What `exgrpo data prepare` made of the rows: counts for people, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exgrpo_megatron.data.foreign import NO_ANSWER, NO_QUESTION, NOT_ONE_TURN, Candidate, ForeignFile

REASONS: dict[str, str] = {
    NO_QUESTION: "no question",
    NO_ANSWER: "no answer",
    NOT_ONE_TURN: "not one message of the user",
    "question_type": "of a type that is dropped (--drop-type)",
    "not_verified": "not said to be right (--verified)",
    "too_many_characters": "a longer question than --max-question-chars",
    "no_solution": "no solution (--solutions)",
    "contradictory": "the same question with another answer",
    "duplicate": "a question that was there before",
    "not_understood": "an answer that no response can match",
    "tokenizer_cannot_write": "characters that the tokenizer cannot write",
    "too_many_tokens": "a longer prompt than --max-prompt-tokens",
}
"""Why a row is left out, in the order in which rows are looked at: a row has the first that applies."""

EXAMPLES = 3
"""Rows that are quoted for each reason."""


@dataclass
class PrepareReport:
    """Counts of rows; every row is either kept or has one reason."""

    out: Path
    held_out: Path | None
    path: Path
    """Of the report itself."""
    num_rows: int = 0
    num_kept: int = 0
    num_held_out: int = 0
    """Among those kept."""
    num_ids_made: int = 0
    num_ids_replaced: int = 0
    """Ids of another question, or too long."""
    num_system_prompts: int = 0
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    categories: Counter[str] = field(default_factory=Counter)
    question_types: Counter[str] = field(default_factory=Counter)
    """Of all rows, dropped ones too."""
    instructions: Counter[str] = field(default_factory=Counter)
    unseen_types: list[str] = field(default_factory=list)
    """Types that were to be dropped and that no row has."""
    sha256: dict[str, str] = field(default_factory=dict)

    def count_rows(self, source: ForeignFile, num_rows: int) -> None:
        """`num_rows` more of a file."""
        self.num_rows += num_rows
        entry = self.inputs.setdefault(str(source.path), {"format": str(source.kind), "rows": 0})
        entry["rows"] += num_rows

    def see(self, candidate: Candidate) -> None:
        """Count what is of interest in every row."""
        self.num_system_prompts += candidate.had_system_prompt
        if candidate.instruction:
            self.instructions[candidate.instruction] += 1
        if candidate.question_type:
            self.question_types[candidate.question_type] += 1

    def look_for_types(self, drop_types: Iterable[str]) -> None:
        """Note those of `--drop-type` that no row has."""
        seen = {name.casefold() for name in self.question_types}
        self.unseen_types = [name for name in drop_types if name.casefold() not in seen]

    def drop(self, candidate: Candidate, reason: str) -> None:
        """Count a row that is left out, with a few of them quoted."""
        self.dropped[reason] += 1
        quoted = self.examples.setdefault(reason, [])
        if len(quoted) < EXAMPLES:
            quoted.append(
                {"place": candidate.place, "question": candidate.question[:200], "answer": candidate.answer[:200]}
            )

    def keep(self, category: str, *, held_out: bool) -> None:
        """Count a row that was written."""
        self.num_kept += 1
        self.num_held_out += held_out
        self.categories[category] += 1

    def reasons(self) -> str:
        """Such as `12 no answer, 3 duplicate`."""
        return ", ".join(f"{self.dropped[reason]} {reason}" for reason in REASONS if self.dropped[reason]) or "none"

    def lines(self) -> list[str]:
        """For people."""
        formats = Counter(entry["format"] for entry in self.inputs.values())
        shown = ", ".join(f"{count} of format {name}" for name, count in formats.items())
        told = [f"{self.num_rows} rows of {len(self.inputs)} files ({shown}): {self.num_kept} kept"]
        told += [
            f"  {count} left out: {text}{self._example(reason)}"
            for reason, text in REASONS.items()
            if (count := self.dropped[reason])
        ]
        told += [f"  cut from {count} questions: {text!r}" for text, count in self.instructions.items()]
        notes = {
            "system prompts not taken over: the recipe has its own": self.num_system_prompts,
            "ids made from the question: the row has none": self.num_ids_made,
            "ids replaced: another question has the same, or it is too long": self.num_ids_replaced,
        }
        told += [f"  {count} {text}" for text, count in notes.items() if count]
        if self.unseen_types:
            there = ", ".join(self.question_types) or "no types at all"
            told.append(
                f"  note: no row is of the type {', '.join(self.unseen_types)} (--drop-type); there are {there}"
            )
        told.append(f"written: {self.out}, {self.num_kept - self.num_held_out} questions")
        if self.held_out:
            told.append(f"written: {self.held_out}, {self.num_held_out} held-out questions")
        return [*told, f"written: {self.path}"]

    def as_json(self) -> dict[str, Any]:
        """What the report file has."""
        return {
            "inputs": self.inputs,
            "rows": self.num_rows,
            "kept": self.num_kept,
            "held_out": self.num_held_out,
            "dropped": {reason: self.dropped[reason] for reason in REASONS if self.dropped[reason]},
            "examples": self.examples,
            "categories": dict(self.categories.most_common()),
            "question_types": dict(self.question_types.most_common()),
            "instructions_cut": dict(self.instructions),
            "types_not_found": self.unseen_types,
            "system_prompts_not_taken": self.num_system_prompts,
            "ids_made": self.num_ids_made,
            "ids_replaced": self.num_ids_replaced,
            "sha256": self.sha256,
        }

    def _example(self, reason: str) -> str:
        return f" ({self.examples[reason][0]['place']})"
