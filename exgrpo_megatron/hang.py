"""A run that stands still is noticed, explained and ended: every process watches where all of them are.

A thread of each process notes in a store, beside the collectives and without them, where its process is (`places.py`).
Where nothing has moved for `cluster.hang_timeout_s`, it reads what the others noted and judges who is behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from exgrpo_megatron.places import Places

BEAT_S = 10.0
"""Between two notes of a process, at most."""

MAX_NAMED = 8
"""Ranks that an error names; a file in the run's folder has all."""


class SideStore(Protocol):
    """What is used of `torch.distributed.Store`; RuntimeError where it cannot be reached."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Sighting:
    """What a process last noted of itself."""

    rank: int
    host: str
    process: int
    place: str
    count: int
    still_s: float
    """Since something moved, as far as the process was running."""
    since: str
    """The time of day when something last moved, by the clock of its machine."""
    beat: int
    """Notes so far: a process that makes no more has been stopped, or is gone."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"


@dataclass(frozen=True)
class Verdict:
    """Why the run must end."""

    text: str
    is_mine: bool
    """Whether this process found it, and is the one to say so."""


class Lookout:
    """Notes where this process is, and judges by the notes of all whether the run stands still.

    It does where this process has not moved for `limit_s`, nor has any of those furthest behind: one that gets on,
    however slowly, is waited for. Time in which the process itself was stopped does not count; another one that makes
    no note is waited for as long.
    """

    def __init__(
        self, places: Places, connect: Callable[[], SideStore], rank: int, world_size: int, limit_s: float
    ) -> None:
        """`connect` is called by the first `look`, and again where it fails."""
        self.beat_s = min(BEAT_S, limit_s / 40)
        self._places, self._connect, self._rank, self.world_size = places, connect, rank, world_size
        self.limit_s = limit_s
        self._store: SideStore | None = None
        self._moves, self._still_s, self._since, self._beat = -1, 0.0, "", 0
        self._heard: dict[int, tuple[int, float]] = {}
        """The last beat of each rank, and the `still_s` of this one when it was new."""
        self._first_reading_s = limit_s / 2
        """Early enough to know, not long after the limit, who has been silent for all of it."""
        self._next_reading_s = self._first_reading_s
        self._found = False
        """At the last reading: what is found must still be so at the next."""
        self._asked_s = 0.0
        """How long the store took to answer the last time, or not to."""
        self._unanswered_s = 0.0
        """Since the store last answered."""
        self.seen: list[Sighting | None] = []
        """Of all ranks, at the last judgement; None for one that never came."""

    def look(self, elapsed_s: float) -> Verdict | None:
        """To be called every `beat_s`; `elapsed_s` is the time since the last call."""
        own = self._sighting(elapsed_s)
        began = time.monotonic()
        try:
            return self._noted(own)
        finally:
            self._asked_s = time.monotonic() - began

    def _noted(self, own: Sighting) -> Verdict | None:
        try:
            self._store = self._store or self._connect()
            self._store.set(_key(self._rank), json.dumps(asdict(own)))
            if self._store.check([_VERDICT]):
                return Verdict(self._store.get(_VERDICT).decode(), False)
            text = self._judge(self._store, own.still_s) if own.still_s >= self._next_reading_s else None
            self._unanswered_s = 0.0
            if text is None:
                return None
            agreed = self._store.compare_set(_VERDICT, "", text).decode()
            return Verdict(agreed, agreed == text)
        except RuntimeError as error:  # the store's server is gone, or does not answer
            # Nobody can be asked whether another speaks: rank 0 is given the time to.
            self._store = None  # what hit this connection need not hit a new one
            if min(own.still_s, self._unanswered_s) < (1.5 if self._rank == 0 else 2.0) * self.limit_s:
                return None
            return Verdict(self._alone(own, error), True)

    def table(self) -> str:
        """A line a rank."""
        return "\n".join(
            f"rank {rank}: never came"
            if one is None
            else f"{one}: {one.place}; nothing moved since {one.since}, {one.still_s:.0f} s; {one.count} places so far"
            for rank, one in enumerate(self.seen)
        )

    def _sighting(self, elapsed_s: float) -> Sighting:
        place = self._places.now()
        self._beat += 1
        # A longer time is one in which the process was stopped.
        passed_s = min(elapsed_s, 2 * self.beat_s + self._asked_s)
        self._unanswered_s += passed_s
        if place.moves != self._moves:
            self._moves, self._still_s, self._since = place.moves, 0.0, time.strftime("%H:%M:%S")
            self._next_reading_s, self._found, self._heard = self._first_reading_s, False, {}
        else:
            self._still_s += passed_s
        return Sighting(
            self._rank, socket.gethostname(), os.getpid(), place.name, place.count, self._still_s, self._since,
            self._beat,
        )  # fmt: skip

    def _judge(self, store: SideStore, still_s: float) -> str | None:
        """The verdict; None where there is none yet. `still_s` is of this process."""
        self._next_reading_s = max(self.limit_s, still_s + self.limit_s / 10)
        self.seen = [_read(store, rank) for rank in range(self.world_size)]
        there = [one for one in self.seen if one is not None]
        for one in there:
            if self._heard.get(one.rank, (0, 0.0))[0] != one.beat:
                self._heard[one.rank] = one.beat, still_s
        quiet_s = {rank: still_s - heard_at for rank, (_, heard_at) in self._heard.items()}
        silent = [one for one in there if quiet_s[one.rank] >= self.limit_s]
        alive = [one for one in there if one not in silent]
        doubtful = any(quiet_s[one.rank] > 0 for one in alive)  # suspended, perhaps: it may move yet
        least = min(one.count for one in alive)
        behind = [one for one in alive if one.count == least]
        # Whoever is silent or missing: as long as one of these moves, the run does not yet wait for it alone.
        moves = any(one.still_s < self.limit_s for one in behind)
        found = still_s >= self.limit_s and not moves and not doubtful
        before, self._found = self._found, found
        if not (before and found):
            return None
        missing = [rank for rank, one in enumerate(self.seen) if one is None]
        return self._explained(missing, silent, behind, [one for one in alive if one.count > least])

    def _explained(
        self, missing: list[int], silent: list[Sighting], behind: list[Sighting], others: list[Sighting]
    ) -> str:
        clauses = [f"rank {rank} never came to the start" for rank in missing]
        clauses += [f"{one} does not answer any more; it was last seen in {one.place}" for one in silent]
        if clauses:
            others = [*behind, *others]
        elif others:
            clauses = [f"{one} is behind the others: in {one.place} since {one.since}" for one in behind]
        else:
            who = str(behind[0]) if len(behind) == 1 else f"all {len(behind)} ranks"
            clauses = [f"{who} {'is' if len(behind) == 1 else 'are'} in {behind[0].place} since {behind[0].since}"]
        clauses = [*clauses[:MAX_NAMED], *([f"{len(clauses) - MAX_NAMED} more"] if len(clauses) > MAX_NAMED else [])]
        waiting = [f"{_ranks([one.rank for one in some])} in {place}" for place, some in _by_place(others)]
        return (
            f"nothing has moved for {self.limit_s:g} s (cluster.hang_timeout_s): {'; '.join(clauses)}"
            + (f"; waiting for it: {', '.join(waiting)}" if waiting else "")
        )  # fmt: skip

    def _alone(self, own: Sighting, error: RuntimeError) -> str:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"nothing has moved for {own.still_s:.0f} s (cluster.hang_timeout_s): {own} is in {own.place} since "
            f"{own.since}; where the others are is not known ({reason})"
        )


@contextmanager
def watched(lookout: Lookout, rank: int, folder: Path, leave: Callable[[str, bool], None]) -> Iterator[None]:
    """Inside, a thread looks. Where the run stands still, it writes the stacks of all threads into `folder` and calls
    `leave(message, whether this process is the one to say it)`, which must end the process: the program's own thread
    can not."""
    over = threading.Event()

    def watch() -> None:
        # Here, and not for long: the file system may hang.
        _within(_PATIENCE_S, lambda: _set_aside(folder, rank, lookout.world_size))
        last = time.monotonic()
        while not over.wait(lookout.beat_s):
            # Should even this thread get no turn, one without Python writes the stacks to the log.
            faulthandler.dump_traceback_later(max(60.0, 1.5 * lookout.limit_s), file=_STDERR)
            now = time.monotonic()
            verdict = lookout.look(now - last)
            last = now
            if verdict and not over.is_set():
                _end(verdict)

    def _end(verdict: Verdict) -> None:
        table = lookout.table() if verdict.is_mine else None
        written = _within(_PATIENCE_S, lambda: _write_stacks(folder, rank, table))
        if not written:
            faulthandler.dump_traceback(_STDERR)
        if verdict.is_mine:
            time.sleep(min(max(2 * lookout.beat_s, 3.0), _PATIENCE_S))  # the others see it, and write theirs
        where = f"{folder} has the stacks of every process that answered" if written else "the log has the stacks"
        leave(f"{verdict.text}. {where}", verdict.is_mine)

    watcher = threading.Thread(target=watch, name="exgrpo-hang-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(_PATIENCE_S)
        faulthandler.cancel_dump_traceback_later()


_VERDICT = "verdict"
_PATIENCE_S = 15.0
"""For what may hang itself: a file system, the store."""
_STDERR = sys.__stderr__.fileno() if sys.__stderr__ else 2


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _read(store: SideStore, rank: int) -> Sighting | None:
    return Sighting(**json.loads(store.get(_key(rank)))) if store.check([_key(rank)]) else None


def _by_place(sightings: Sequence[Sighting]) -> list[tuple[str, list[Sighting]]]:
    places = dict.fromkeys(one.place for one in sightings)
    return [(place, [one for one in sightings if one.place == place]) for place in places]


def _ranks(ranks: list[int]) -> str:
    """Such as `ranks 0, 2-7`; in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _write_stacks(folder: Path, rank: int, table: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if table:
        (folder / "places.txt").write_text(f"{table}\n", encoding="utf-8")
    with (folder / f"rank_{rank:05d}.txt").open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file)


def _set_aside(folder: Path, rank: int, world_size: int) -> None:
    """What an earlier run left goes into a folder of its own, lest it be taken for this one's."""
    old = [folder / f"rank_{rank:05d}.txt"]
    if rank == 0:  # also of ranks that this run does not have
        others = [path for path in folder.glob("rank_*.txt") if int(path.stem[5:]) >= world_size]
        old += [folder / "places.txt", *others]
    for path in old:
        if path.exists():
            (folder / "before").mkdir(exist_ok=True)
            path.replace(folder / "before" / path.name)


def _within(seconds: float, work: Callable[[], None]) -> bool:
    """Whether the work was done in time and without an OSError."""
    done = threading.Event()

    def run() -> None:
        with suppress(OSError):
            work()
            done.set()

    threading.Thread(target=run, daemon=True).start()
    return done.wait(seconds)
