"""Exchange of Python objects between data-parallel ranks; only `policy/` makes process groups."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Communicator(Protocol):
    """The data-parallel group seen from one rank. Every method is collective over the group."""

    rank: int
    size: int

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order, on every rank."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""

    def barrier(self) -> None: ...


class SingleProcess:
    """The group of one."""

    rank = 0
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None


def all_gather_concat(comm: Communicator, values: list[T]) -> list[T]:
    """Concatenation, in rank order, of every rank's list."""
    return [value for part in comm.all_gather(values) for value in part]
