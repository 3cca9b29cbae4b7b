"""What `exgrpo eval` is asked for; imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class QuestionsOf(StrEnum):
    """Which questions of a recipe are evaluated."""

    validation = "validation"
    train = "train"
    sets = "sets"
    """Those of `eval.sets`."""


@dataclass(frozen=True)
class EvalRequest:
    """What is evaluated, and what of it is measured."""

    checkpoint: Path
    questions: QuestionsOf = QuestionsOf.validation
    entropy: bool = False
    """Also the token entropy of every sampled answer, by the policy."""
