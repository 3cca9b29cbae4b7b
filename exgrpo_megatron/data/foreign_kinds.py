"""Names of what foreign question files have; without the imports that reading them needs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class SourceFormat(StrEnum):
    """What the columns of a file mean."""

    openr1 = "openr1"
    verl = "verl"
    questions = "questions"


REQUIRED: Mapping[SourceFormat, tuple[str, ...]] = {
    SourceFormat.openr1: ("problem", "answer"),
    SourceFormat.verl: ("prompt", "reward_model"),
    SourceFormat.questions: ("question", "answer"),
}
"""Columns that make a format."""


class SolutionOf(StrEnum):
    """Where the worked solution of a question is taken from."""

    none = "none"
    written = "written"
    """The column `solution`: what people wrote."""
    reasoning = "reasoning"
    """The answer of the assistant in `messages` (OpenR1-Math) or `target` (verl files with demonstrations)."""
