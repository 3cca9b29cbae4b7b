"""Leaving a run on SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_REQUEST_S = 1.0
"""Signals this close together are one: a terminal and a launcher may both pass on the same Ctrl-C."""

_NOTICE = b"\nstopping after this step (Ctrl-C again stops at once, without saving)\n"


class StoppedAtOnceError(BaseException):
    """Ctrl-C once more. No Exception, so that nothing on the way out takes it for a failure it can handle."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as an error does, so that what is written aside is removed; exit code 143."""

    def end(number: int, _frame: FrameType | None) -> None:
        os.write(2, b"error: stopped by SIGTERM; what was written so far is removed\n")
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopSignal:
    """SIGTERM or Ctrl-C asks for a clean stop after the current step; Ctrl-C after that stops at once.

    SIGTERM does not: it comes several times for one request, from Slurm to every process, from torchrun to its ranks,
    and from Slurm again when the time it gave is over, with SIGKILL behind it.
    """

    def __init__(self, *, announce: bool = False) -> None:
        """`announce`: say on stderr that the first signal was understood; for one rank only."""
        self.requested = False
        self._announce = announce
        self._requested_at = 0.0

    @contextmanager
    def installed(self, *, to_the_end: bool = False) -> Iterator[StopSignal]:
        """Handles the signals inside the block.

        Where an error leaves it, SIGTERM is ignored from then on: the process is ending, and a launcher that ends all
        ranks because one of them is lost shall not cut off what this one has to say of it. `to_the_end`: so it is in
        any case, for there is nothing left to stop, and others wait for this process to leave in good order.
        """
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        if to_the_end:
            before[signal.SIGTERM] = _ignored
        try:
            yield self
        except Exception:
            before[signal.SIGTERM] = _ignored  # not SIG_IGN, which processes started later would inherit
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._requested_at = True, now
            if self._announce:
                # Not through sys.stderr: the signal may have come in the middle of a write to it.
                os.write(2, _NOTICE)
        elif number == signal.SIGINT and now - self._requested_at > SAME_REQUEST_S:
            raise StoppedAtOnceError


def _ignored(_number: int, _frame: FrameType | None) -> None:
    return None
