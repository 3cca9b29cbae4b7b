"""Bytes of experience in the memory of one process, not of its GPU."""

from __future__ import annotations

from dataclasses import dataclass

_INDEX_BYTES = 320
"""Of a question in the index: id, bucket, place in two tables (240 measured)."""
_ANSWER_BYTES, _TOKEN_BYTES = 400, 8
"""Of a stored answer: its objects (364 measured), and an int32 id and a float32 log-prob a token."""


@dataclass(frozen=True)
class ExperienceBytes:
    """Upper bounds: every answer right, new and of the greatest length, and no question retired."""

    questions: int
    answers: int
    index: int
    stored: int
    """The answers that one owner keeps."""


def experience_bytes(*, questions: int, answers: int, tokens: int, owners: int) -> ExperienceBytes:
    """For so many questions and answers of `tokens` tokens, the answers shared out among `owners`."""
    kept = -(-answers // owners)
    return ExperienceBytes(
        questions=questions,
        answers=answers,
        index=questions * _INDEX_BYTES,
        stored=kept * (_ANSWER_BYTES + _TOKEN_BYTES * tokens),
    )
