"""What became of what was given to the buffer; the same on every process."""

from __future__ import annotations

from dataclasses import dataclass, field

from exgrpo_megatron.experience.history import Event


@dataclass(frozen=True)
class RefusedAnswer:
    """A correct answer that was not stored because it could not have been replayed."""

    question_id: str
    reason: str


@dataclass
class RecordReport:
    """What became of the groups of one step."""

    stored: int = 0
    """New answers stored."""
    duplicates: int = 0
    """Correct answers whose token ids were stored already."""
    not_collected: int = 0
    """Correct answers left out because nothing is collected yet."""
    truncated: int = 0
    """Correct answers left out because they were cut off."""
    unsolved: int = 0
    """Groups without a correct answer: nothing changes for their questions."""
    already_retired: int = 0
    """Groups of questions retired before this step: nothing is stored for them."""
    retired: list[str] = field(default_factory=list)
    """Questions newly retired."""
    refused: list[RefusedAnswer] = field(default_factory=list)
    evicted_of_question: int = 0
    """Answers that went because their question had more than `experience.max_answers_per_question`."""
    evicted_of_answers: int = 0
    """Answers that went because there were more than `experience.max_answers`."""
    evicted_of_bytes: int = 0
    """Answers that went because all together had more than `experience.max_bytes`."""
    events: list[Event] = field(default_factory=list, compare=False)
    """The same by question and answer, with what became of stored answers since the step before."""


@dataclass
class MergeReport:
    """What was taken from an experience file."""

    questions: int = 0
    """Questions that were not stored before."""
    answers: int = 0
    """Answers added."""
    duplicates: int = 0
    """Answers left out because their token ids were stored already."""
    retired: int = 0
    """Answers left out because their question is retired here."""
    evicted: int = 0
    """Answers that went because a cap was reached."""
    damaged: int = 0
    """Answers left out because their record is damaged (`experience.on_corruption: quarantine`)."""
