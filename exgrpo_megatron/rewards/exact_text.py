r"""Rewards by the text alone: the box holds what the gold answer holds, character by character."""

from __future__ import annotations

from collections.abc import Sequence

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.rules import boxed, boxed_answer
from exgrpo_megatron.rewards.verifier import Graded, Status, Verdict


class ExactTextVerifier:
    """Compares the last closed box with the gold answer; white space around either does not count.

    For answers in which leading zeros, signs or the order of digits mean something: Math-Verify takes 06 for 6.
    """

    def __init__(self, config: MathEnvConfig) -> None:
        self._max_boxed_chars = config.max_boxed_chars

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """The verdict on each (response text, gold answer), in order."""
        statuses = [self._status(response, gold) for response, gold, *_ in items]
        return [Verdict(reward=float(status == "correct"), status=status) for status in statuses]

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        """Indices of the gold answers that no response can match: longer than `max_boxed_chars`, or with braces that
        are not closed."""
        verdicts = self.grade([(boxed(answer), answer) for answer in answers])
        return [index for index, verdict in enumerate(verdicts) if verdict.status != "correct"]

    def close(self) -> None:
        """There is nothing to end."""

    def _status(self, response: str, gold: str) -> Status:
        answer = boxed_answer(response)
        if answer is None:
            return "no_box"
        if len(answer) > self._max_boxed_chars:
            return "too_long"
        return "correct" if answer == boxed_answer(boxed(gold)) else "wrong"
