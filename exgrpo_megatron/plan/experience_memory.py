"""Bytes of experience in the memory of one process, not of its GPU, and on its disk."""

from __future__ import annotations

from dataclasses import dataclass

_INDEX_BYTES = 100
"""Of a question in the index: id, digest, bucket, place (55 measured, with ids of 20 bytes)."""
_ANSWER_BYTES = 40
"""Of an answer in its owner's table."""
_RECORD_BYTES, _TOKEN_BYTES = 80, 7
"""Of an answer on disk: header and question id, at most 3 bytes of id and 4 of log-prob a token (3 to 5 measured)."""


@dataclass(frozen=True)
class ExperienceBytes:
    """Upper bounds: every answer right, new and of the greatest length, and no question retired."""

    questions: int
    answers: int
    index: int
    table: int
    """In memory, of the answers that one owner keeps."""
    disk: int
    """Of these answers themselves; dropped ones, until they are compacted, take at most as much again."""


def experience_bytes(*, questions: int, answers: int, tokens: int, owners: int) -> ExperienceBytes:
    """For so many questions and answers of `tokens` tokens, the answers shared out among `owners`."""
    kept = -(-answers // owners)
    return ExperienceBytes(
        questions=questions,
        answers=answers,
        index=questions * _INDEX_BYTES,
        table=kept * _ANSWER_BYTES,
        disk=kept * (_RECORD_BYTES + _TOKEN_BYTES * tokens),
    )
