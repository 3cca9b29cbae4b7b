"""Where a process of a run is, for a thread of it that looks from time to time (`hang.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

READING = "reading the model's configuration and the questions"
LOADING = "loading the model"
STARTING = "starting the engine"
"""Places of several commands."""


@dataclass(frozen=True)
class Place:
    """A moment's whereabouts."""

    name: str
    """From the outside to the inside, such as `step 3, rollout, all gather`."""
    count: int
    """Places entered and left so far. Where all processes pass the same ones, who has the least is behind."""
    moves: int
    """Changes with every sign of life: places, and what `advance` says within one."""


class Places:
    """Kept by one thread, the program's, and read by any. Nothing here waits, or asks for the time.

    Every process of a run must pass the same places in the same order: one that the main process alone has work in is
    entered by all.
    """

    def __init__(self) -> None:
        self._inside: tuple[str, ...] = ()
        self._count = self._moves = 0

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Around the work, or the waiting, of a place."""
        before = self._inside
        self._inside = (*before, name)
        self._count += 1
        try:
            yield
        finally:
            self._inside = before
            self._count += 1

    def advance(self) -> None:
        """Say that the work of this place gets on; ranks may say so a different number of times, and any thread may."""
        self._moves += 1

    def now(self) -> Place:
        """Where the process is."""
        return Place(", ".join(self._inside) or "between two phases", self._count, self._count + self._moves)
