"""New answers into a store, those of a whole step together: that is sooner than one by one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_megatron.experience.answers import AnswerStore
from exgrpo_megatron.experience.encoding import encode_all
from exgrpo_megatron.types import Logprobs, StoredAnswer


class Lot(NamedTuple):
    """New answers of a question, whose serials follow one another."""

    question: int
    """Its row in the table of ids."""
    question_id: str
    serial: int
    """Of the first."""
    answers: Sequence[StoredAnswer]


class Added(NamedTuple):
    """What became of a lot."""

    serials: tuple[int, ...]
    """Of the answers that are stored; the token ids of the others were stored already, and the first log-probs stay."""
    num_answers: int
    """Of the question afterwards."""
    num_bytes: int
    """Of the new records."""


def add_all(store: AnswerStore, lots: Sequence[Lot]) -> list[Added]:
    """Store the answers of different questions."""
    known = [store.slots(lot.question) for lot in lots]
    found = [_new_ones(store, lot, slots) for lot, slots in zip(lots, known, strict=True)]
    every = [new for listed in found for new in listed]
    records = encode_all([
        (lot.question_id, new.serial, new.answer) for lot, listed in zip(lots, found, strict=True) for new in listed
    ])  # fmt: skip
    values: dict[str, Sequence[Any]] = {
        "fingerprint": [new.fingerprint for new in every],
        "serial": [new.serial for new in every],
        "used": [new.answer.step for new in every],
        "entropy": [-_mean(new.answer.logprobs) for new in every],
    }
    slots = store.append_all(records, values)
    added, links, begin = [], [], 0
    for lot, before, listed in zip(lots, known, found, strict=True):
        end = begin + len(listed)
        links.append((lot.question, before, slots[begin:end]))
        serials = tuple([new.serial for new in listed])
        added.append(Added(serials, len(before) + len(listed), sum(map(len, records[begin:end]))))
        begin = end
    store.link_all(links)
    return added


def add(store: AnswerStore, question: int, question_id: str, serial: int, answer: StoredAnswer) -> bool:
    """Store one; False where its token ids are stored already."""
    return bool(add_all(store, [Lot(question, question_id, serial, (answer,))])[0].serials)


class _New(NamedTuple):
    serial: int
    fingerprint: int
    answer: StoredAnswer


def _new_ones(store: AnswerStore, lot: Lot, slots: list[int]) -> list[_New]:
    """The lot without answers that are in these slots, or twice in it."""
    news = [
        _New(serial, zlib.crc32(np.ascontiguousarray(answer.token_ids, np.int32).data), answer)
        for serial, answer in enumerate(lot.answers, lot.serial)
    ]
    before = store.column("fingerprint")[slots].tolist() if slots else []
    if len({*before, *[new.fingerprint for new in news]}) == len(before) + len(news):
        return news
    found: list[_New] = []
    for new in news:
        alike = [slot for slot, fingerprint in zip(slots, before, strict=True) if fingerprint == new.fingerprint]
        if not any(_same_tokens(new, other) for other in found) and not any(
            store.has_tokens(slot, new.answer.token_ids) for slot in alike
        ):
            found.append(new)
    return found


def _same_tokens(one: _New, other: _New) -> bool:
    return one.fingerprint == other.fingerprint and np.array_equal(one.answer.token_ids, other.answer.token_ids)


def _mean(values: Logprobs) -> float:
    """As numpy's own, without what that takes for a few numbers."""
    return float(np.add.reduce(values, dtype=np.float64)) / len(values)
