"""Exchange of Python objects between ranks; only `policy/` makes process groups."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


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
    world_size: int
    """Processes."""
    is_main: bool
    """Whether this is the one process that writes and prints; its data-parallel rank is 0."""

    def all_gather(self, value: T) -> list[T]:
        """The value of every data-parallel rank, in rank order; the same list on every process."""

    def agreed(self, value: T) -> T:
        """One value on all processes of a data-parallel rank: that of the first of them."""

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
    world_size = 1
    is_main = True

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def agreed(self, value: Any) -> Any:
        return value

    def anywhere(self, flag: bool) -> bool:
        return flag

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None


def all_gather_concat(comm: Communicator, values: list[T]) -> list[T]:
    """Concatenation, in rank order, of every data-parallel rank's list."""
    return [value for part in comm.all_gather(values) for value in part]
