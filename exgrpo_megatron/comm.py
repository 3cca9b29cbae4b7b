"""Exchange of Python objects between ranks; only `policy/` makes process groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

from exgrpo_megatron.errors import UserError
from exgrpo_megatron.places import Places

T = TypeVar("T")
K = TypeVar("K")


@runtime_checkable
class Communicator(Protocol):
    """The processes of a run seen from one of them.

    The ranks that hold one copy of the model between them (tensor, context and pipeline parallel) are one data-parallel
    rank: they run the same steps on the same sequences. Every method is collective over all processes.
    """

    rank: int
    """Data-parallel rank: which share of the work is this process's."""
    size: int
    """Data-parallel ranks."""
    member: int
    """Which of the processes of its data-parallel rank this is; 0 is the first, whose values `agreed` hands out."""
    members: int
    """Processes of a data-parallel rank."""
    world_size: int
    """Processes."""
    is_main: bool
    """Whether this is the one process that writes and prints; its data-parallel rank is 0."""
    places: Places
    """Where this process is, for those who wait for it."""

    def all_gather(self, value: T) -> list[T]:
        """The value of every data-parallel rank, in rank order; the same list on every process."""

    def agreed(self, value: T) -> T:
        """One value on all processes of a data-parallel rank: that of the first of them."""

    def gather_members(self, value: T) -> list[T]:
        """The value of every process of this data-parallel rank, in their order; the same list on all of them."""

    def anywhere(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""

    def broadcast(self, value: T) -> T:
        """The main process's value on every process."""

    def barrier(self) -> None:
        """Wait for every process."""


class SingleProcess:
    """The group of one."""

    rank = 0
    size = 1
    member = 0
    members = 1
    world_size = 1
    is_main = True

    def __init__(self) -> None:
        self.places = Places()

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def agreed(self, value: Any) -> Any:
        return value

    def gather_members(self, value: Any) -> list[Any]:
        return [value]

    def anywhere(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None


def all_gather_concat(comm: Communicator, values: list[T]) -> list[T]:
    """Concatenation, in rank order, of every data-parallel rank's list."""
    return [value for part in comm.all_gather(values) for value in part]


def all_gather_union(comm: Communicator, mine: dict[K, T]) -> dict[K, T]:
    """The entries of every data-parallel rank's dictionary; ranks must not share a key."""
    return {key: value for part in comm.all_gather(mine) for key, value in part.items()}


def gather_everyone(comm: Communicator, value: T) -> list[T]:
    """The value of every process, data-parallel rank by data-parallel rank; the same list on all of them."""
    return all_gather_concat(comm, comm.gather_members(value))


def in_order(indexed: Iterable[tuple[int, T]]) -> list[T]:
    """The values of (index, value) pairs that came from several processes, by index."""
    return [value for _, value in sorted(indexed, key=lambda pair: pair[0])]


def gather_parts(comm: Communicator, part: list[tuple[int, T]]) -> list[T]:
    """The values of every process's (index, value) pairs, by index, those of one index in the order of their process;
    the same list on all processes."""
    return in_order(pair for pairs in gather_everyone(comm, part) for pair in pairs)


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Nobody goes on alone: what a user must change (or a full disk), met on one process, is raised on all.

    The work inside must not be collective itself: a process that fails in it would leave the others waiting.
    """
    mine: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as error:
        mine = error
    failures = [failure for failure in gather_everyone(comm, mine) if failure is not None]
    if failures:
        raise mine or failures[0]
