"""Which answers go when a cap is reached: an order over all of them that does not depend on who keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import Eviction
from exgrpo_megatron.experience.answers import AnswerStore, Slots
from exgrpo_megatron.experience.ids import IdTable


class Candidate(NamedTuple):
    """An answer that may go; of two, the smaller goes first."""

    key: float
    serial: int
    question_id: str
    length: int
    """Bytes of its record."""


def evict_of_question(store: AnswerStore, question: int, cap: int | None, policy: Eviction) -> tuple[int, ...]:
    """Bring the answers of a question down to `cap`; returns the serials of those that went."""
    slots = store.slots(question)
    if cap is None or len(slots) <= cap:
        return ()
    going = _in_order(store, np.array(slots), policy)[: len(slots) - cap]
    serials = tuple(store.column("serial")[going].tolist())
    for slot in going.tolist():
        store.remove(slot)
    return serials


def candidates(store: AnswerStore, ids: IdTable, policy: Eviction, answers: int, length: int) -> list[Candidate]:
    """The first of a store's answers to go, until as many are free or as many bytes: whatever the others keep, no more
    of these can have to go."""
    slots = _in_order(store, store.live(), policy)
    before = np.cumsum(store.column("length")[slots], dtype=np.int64) - store.column("length")[slots]
    slots = slots[(np.arange(len(slots)) < answers) | (before < length)]
    names = map(ids.name, store.column("question")[slots].tolist())
    serials, lengths = (store.column(name)[slots].tolist() for name in ("serial", "length"))
    return list(map(Candidate, _keys(store, slots, policy).tolist(), serials, names, lengths))


def first_to_go(proposed: Iterable[Candidate], answers: int, length: int) -> list[Candidate]:
    """Of everybody's candidates as many as it takes."""
    chosen: list[Candidate] = []
    freed = 0
    for candidate in sorted(proposed):
        if len(chosen) >= answers and freed >= length:
            break
        chosen.append(candidate)
        freed += candidate.length
    assert all(one.serial != other.serial for one, other in pairwise(chosen)), "two answers of one serial"
    return chosen


def _in_order(store: AnswerStore, slots: Slots, policy: Eviction) -> Slots:
    return slots[np.lexsort((store.column("serial")[slots], _keys(store, slots, policy)))]


def _keys(store: AnswerStore, slots: Slots, policy: Eviction) -> NDArray[np.float64]:
    """The lower, the sooner it goes; equals go in the order in which they came."""
    match policy:
        case "oldest":
            return store.column("serial")[slots].astype(np.float64)
        case "highest_entropy":
            return -store.column("entropy")[slots].astype(np.float64)
        case "least_recently_replayed":
            return store.column("used")[slots].astype(np.float64)
    raise AssertionError(f"no eviction policy {policy}")
