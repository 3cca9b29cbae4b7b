"""Several processes of a run as threads, whose values travel between them as bytes, as they do between processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from exgrpo_megatron.places import Places

T = TypeVar("T")


class _Board:
    """Where all processes of a run put a value, and read everybody's once all are there."""

    def __init__(self, processes: int) -> None:
        self.values = [b""] * processes
        self.barrier = threading.Barrier(processes, timeout=60)

    def exchange(self, process: int, value: Any) -> list[Any]:
        self.values[process] = pickle.dumps(value)
        self.barrier.wait()
        found = [pickle.loads(value) for value in self.values]
        self.barrier.wait()
        return found


class ThreadRank:
    """Implements `exgrpo_megatron.comm.Communicator`; process p is member p % members of rank p // members."""

    def __init__(self, board: _Board, process: int, size: int, members: int) -> None:
        self._board, self._process = board, process
        self.size, self.members, self.world_size = size, members, size * members
        self.rank, self.member = divmod(process, members)
        self.is_main = process == 0
        self.places = Places()

    def all_gather(self, value: Any) -> list[Any]:
        return self._board.exchange(self._process, value)[:: self.members]

    def gather_members(self, value: Any) -> list[Any]:
        first = self.rank * self.members
        return self._board.exchange(self._process, value)[first : first + self.members]

    def agreed(self, value: Any) -> Any:
        return self.gather_members(value)[0]

    def anywhere(self, flag: bool) -> bool:
        return any(self._board.exchange(self._process, flag))

    def broadcast(self, value: Any) -> Any:
        return self._board.exchange(self._process, value)[0]

    def barrier(self) -> None:
        self._board.exchange(self._process, None)


def on_ranks(size: int, members: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What `work` returns on each process; a process that raises makes all fail, and its error is raised."""
    board = _Board(size * members)

    def run(process: int) -> T:
        try:
            return work(ThreadRank(board, process, size, members))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size * members) as pool:
        futures = [pool.submit(run, process) for process in range(size * members)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
