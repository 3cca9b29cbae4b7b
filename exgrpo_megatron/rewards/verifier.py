r"""Rewards of mathematical answers: rules on the text first, then Math-Verify under a hard time limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Literal

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.pool import Outcome, WorkerPool
from exgrpo_megatron.rewards.rules import boxed, boxed_answer, is_literal

Status = Literal["correct", "wrong", "no_box", "not_literal", "too_long", "timeout", "error"]

Graded = tuple[str, str] | tuple[str, str, str]
"""Response text, gold answer, and the question's text where it is known."""

UNBOXED_TAIL_CHARS = 1000
"""Where a box is not required and there is none, Math-Verify searches this much of the end of the response."""


@dataclass(frozen=True)
class Verdict:
    """What one answer earned, and why."""

    reward: float
    """1 for a correct answer, else 0; of `env.reward_function` any finite number."""
    status: Status

    @property
    def correct(self) -> bool:
        return self.status == "correct"


class MathVerifier:
    """Grades responses against gold answers in `config.num_workers` worker processes.

    The processes start here and end with `close` (or the `with` block, or this process). Calls from several
    threads are served one after the other.
    """

    def __init__(self, config: MathEnvConfig, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called for every answer that a worker graded."""
        self._config = config
        self._pool = WorkerPool(config.num_workers, config.timeout_s, on_progress=on_progress)
        self._cache: OrderedDict[tuple[str, str], Outcome] = OrderedDict()
        self._lock = Lock()

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """The verdict on each (response text, gold answer), in order.

        Takes at most about `timeout_s` for each answer that hangs, divided by the number of workers. Raises
        UserError where the workers cannot start.
        """
        screened = [(self._screen(response), gold) for response, gold, *_ in items]
        requests = [(found.text, boxed(gold)) for found, gold in screened if isinstance(found, _Gradable)]
        with self._lock:
            outcomes = self._outcomes(requests)
        return [
            _verdict(outcomes[found.text, boxed(gold)] if isinstance(found, _Gradable) else found)
            for found, gold in screened
        ]

    def check_gold(self, answers: Sequence[str]) -> list[int]:
        """Indices of the gold answers that earn no reward when they are given as the boxed answer to themselves.

        No response can be rewarded on such a question: Math-Verify does not understand the answer, or it breaks
        `max_boxed_chars` or `require_literal`.
        """
        verdicts = self.grade([(boxed(answer), answer) for answer in answers])
        return [index for index, verdict in enumerate(verdicts) if verdict.status != "correct"]

    def close(self) -> None:
        """End every worker process. May be called twice."""
        with self._lock:
            self._pool.close()

    def _screen(self, response: str) -> _Gradable | Status:
        """The part of the response Math-Verify is to see, or the rule that it breaks."""
        answer = boxed_answer(response)
        if answer is None:
            return "no_box" if self._config.require_box else _Gradable(response[-UNBOXED_TAIL_CHARS:])
        if len(answer) > self._config.max_boxed_chars:
            return "too_long"
        if self._config.require_literal and not is_literal(answer):
            return "not_literal"
        # Only the box: what is written after it could otherwise bring in another answer past the rules.
        return _Gradable(f"\\boxed{{{answer}}}")

    def _outcomes(self, requests: list[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
        """The outcome of every distinct request, from memory or from the workers."""
        known = {request: self._cache[request] for request in requests if request in self._cache}
        unknown = list(dict.fromkeys(request for request in requests if request not in known))
        known.update(zip(unknown, self._pool.run(unknown), strict=True))
        for request, outcome in known.items():
            self._remember(request, outcome)
        return known

    def _remember(self, request: tuple[str, str], outcome: Outcome) -> None:
        # A time-out or a death may be the machine's fault (a busy moment, memory short): it is never remembered,
        # so it can cost this answer only once and a resumed run grades as the first one would.
        if not isinstance(outcome, str):
            self._cache[request] = outcome
            self._cache.move_to_end(request)
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)


@dataclass(frozen=True)
class _Gradable:
    text: str


def _verdict(found: Outcome | Status) -> Verdict:
    if isinstance(found, str):
        return Verdict(0.0, found)
    return Verdict(1.0, "correct") if found else Verdict(0.0, "wrong")
