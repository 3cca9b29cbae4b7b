"""How token ids and log-probs of an answer become bytes: `compact`, and records of earlier versions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from exgrpo_megatron.experience.compact import pack, unpack
from exgrpo_megatron.experience.encoding import HEADER_BYTES, decode, encode, encode_all
from exgrpo_megatron.types import StoredAnswer

EDGES = np.array([place + offset for place in (2**k for k in range(2, 31)) for offset in (-1, 0, 1)], np.int64)
"""Where one class ends and the next begins."""


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, len(EDGES)])
def test_numbers_on_both_sides_of_every_class_come_back(count: int):
    ids, units = EDGES[:count], EDGES[::-1][:count]
    (body,) = pack(ids, units, [count])
    found_ids, found_units = unpack(body, count)
    assert found_ids.tolist() == ids.tolist()
    assert found_units.tolist() == units.tolist()


def test_answers_packed_together_are_those_packed_alone():
    rng = np.random.default_rng(0)
    counts = [1, 40, 700, 3, 64]
    ids, units = rng.integers(0, 150_000, sum(counts)), rng.integers(0, 2**24, sum(counts))
    ends = np.cumsum(counts)
    alone = [pack(ids[end - n : end], units[end - n : end], [n])[0] for n, end in zip(counts, ends, strict=True)]
    assert pack(ids, units, counts) == alone


def test_an_answer_takes_little_more_than_what_cannot_be_said_shorter():
    """Exponential log-probs of mean m in units of 2^-20: log2(e m) + 20 bits each; ids even over 2^16: 16 bits each.
    At most 3% beyond that, and nobody can do with less but by chance."""
    rng, count, mean = np.random.default_rng(0), 4000, 3.4
    logprobs = -rng.exponential(mean, count).astype(np.float32)
    answer = StoredAnswer(rng.integers(0, 2**16, count).astype(np.int32), logprobs, 0, 0)
    least = count * (math.log2(math.e * mean) + 20 + 16) / 8
    assert 0.99 * least < len(encode("q", 0, answer)) - HEADER_BYTES < 1.03 * least


def test_records_of_one_call_are_those_of_one_call_each():
    rng = np.random.default_rng(1)
    items = [
        (f"q{i}", i, StoredAnswer(rng.integers(0, 50_000, n).astype(np.int32), -rng.random(n).astype(np.float32), 0, i))
        for i, n in enumerate([5, 3000, 3000, 1, 700])
    ]
    # One with a log-prob that is kept as it is, among others.
    items.insert(2, ("far", 9, StoredAnswer(np.array([7], np.int32), np.array([-5000.5], np.float32), 0, 0)))
    assert encode_all(items) == [encode(*item) for item in items]
    assert encode_all([]) == []


@pytest.mark.parametrize(
    ("record", "logprobs"),
    [
        (
            "25b96bd520000000050000000900000002000000000000000300000002000003713728b52ffd2015a90000037002001101000100000000000000102800000000",
            [-0.5, -1.25, 0.0],
        ),
        (
            "e56c7d4820000000050000000900000002000000000000000300000002000103713728b52ffd2015a900000370020011010001000000000000000080fabf3ec4",
            [-0.5, 0.25, -2000.0],
        ),
    ],
    ids=["multiples", "float32"],
)
def test_records_of_earlier_versions_are_read(record: str, logprobs: list[float]):
    """Written by the version before `compact`: question q7, serial 5, step 9, version 2."""
    found = decode(bytes.fromhex(record))
    assert (found.question_id, found.serial, found.answer.step, found.answer.policy_version) == ("q7", 5, 9, 2)
    assert found.answer.token_ids.tolist() == [3, 70_000, 258]
    assert found.answer.logprobs.tolist() == logprobs


@pytest.mark.parametrize("count", [8, 100])
def test_bytes_that_are_no_answer_are_refused(count: int):
    (body,) = pack(np.arange(count), np.arange(count) * 1000, [count])
    for wrong in (body[:-1], body + b"\0", body[: count // 2], b"\xff" * len(body)):
        with pytest.raises(ValueError, match=r"in place of|invalid"):
            unpack(wrong, count)
