"""Which data-parallel rank keeps a question's answers: pure arithmetic on its id, the same on every machine."""

from __future__ import annotations

import hashlib

NUM_SHARDS = 4096
"""Virtual shards. With a hundred ranks each owns about forty, so that none has much more than another."""


def shard_of(question_id: str) -> int:
    """The question's shard, 0..NUM_SHARDS-1; every id is as likely to fall into any."""
    digest = hashlib.blake2b(question_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_SHARDS


def owner_of(shard: int, num_ranks: int) -> int:
    """The rank whose contiguous range of shards this is in; ranges differ by one shard at most."""
    return shard * num_ranks // NUM_SHARDS
