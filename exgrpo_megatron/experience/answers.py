"""The stored answers themselves, by question; the part of which a data-parallel rank owns a share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from exgrpo_megatron.types import Logprobs, StoredAnswer, TokenIds


class AnswerStore:
    """Question id -> its stored answers, in the order in which they came, no two with the same token ids."""

    def __init__(self) -> None:
        self._answers: dict[str, list[StoredAnswer]] = {}
        self._num_answers = 0

    @property
    def num_answers(self) -> int:
        return self._num_answers

    def add(self, question_id: str, answer: StoredAnswer) -> bool:
        """Store a copy of the answer; False where its token ids are stored already (the first log-probs stay)."""
        known = self._answers.get(question_id, [])
        if any(np.array_equal(answer.token_ids, other.token_ids) for other in known):
            return False
        self._answers.setdefault(question_id, []).append(_own(answer))
        self._num_answers += 1
        return True

    def count(self, question_id: str) -> int:
        return len(self._answers.get(question_id, ()))

    def get(self, question_id: str) -> tuple[StoredAnswer, ...]:
        """The question's answers; none for a question that is not stored."""
        return tuple(self._answers.get(question_id, ()))

    def items(self) -> Iterator[tuple[str, tuple[StoredAnswer, ...]]]:
        """Every question with its answers."""
        for question_id, answers in self._answers.items():
            yield question_id, tuple(answers)

    def remove(self, question_id: str) -> int:
        """Forget the question's answers; returns how many there were."""
        removed = len(self._answers.pop(question_id, ()))
        self._num_answers -= removed
        return removed


def answer_fault(token_ids: TokenIds, logprobs: Logprobs) -> str | None:
    """Why an answer may not be stored, or None: it needs tokens, and exactly one finite log-prob for each."""
    if not len(token_ids):
        return "it has no tokens"
    if len(logprobs) != len(token_ids):
        return f"it has {len(logprobs)} log-probs for {len(token_ids)} tokens"
    finite = np.isfinite(logprobs)
    if not finite.all():
        first = int(np.argmin(finite))
        return f"log-prob {first} of {len(logprobs)} is {logprobs[first]}"
    return None


def _own(answer: StoredAnswer) -> StoredAnswer:
    """A copy, so that the arrays of a whole batch are not kept alive by one answer, nor changed by their owner."""
    token_ids = np.array(answer.token_ids, dtype=np.int32)
    logprobs = np.array(answer.logprobs, dtype=np.float32)
    token_ids.flags.writeable = logprobs.flags.writeable = False
    return StoredAnswer(token_ids, logprobs, answer.policy_version, answer.step)
