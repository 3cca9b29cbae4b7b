"""Which data-parallel rank keeps a question's answers: pure arithmetic on its id, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

NUM_SHARDS = 4096
"""Virtual shards. With a hundred ranks each owns about forty, so that none has much more than another."""

Digests = TypeVar("Digests", int, NDArray[np.uint64])
Shards = TypeVar("Shards", int, NDArray[np.int64])


def shard_of(question_id: str) -> int:
    """The question's shard, 0..NUM_SHARDS-1; every id is as likely to fall into any."""
    return shard_of_digest(digest_of(question_id))


def digest_of(question_id: str) -> int:
    """64 bits that spread ids evenly."""
    return int.from_bytes(hashlib.blake2b(question_id.encode(), digest_size=8).digest(), "big")


def shard_of_digest(digest: Digests) -> Digests:
    """The shard of one digest or of many."""
    return digest % NUM_SHARDS


def owner_of(shard: Shards, num_ranks: int) -> Shards:
    """The rank whose contiguous range of shards this is in; ranges differ by one shard at most."""
    return shard * num_ranks // NUM_SHARDS
