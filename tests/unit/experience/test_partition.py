"""Which rank keeps which question."""

from collections import Counter

import pytest

from exgrpo_megatron.experience.partition import NUM_SHARDS, owner_of, shard_of


@pytest.mark.parametrize(
    ("question_id", "digest"),
    [("q1", 0xE7837AA50EE28068), ("q2", 0x6A1D8EE949A4246A), ("a question", 0x7BC93433AE42119D)],
)  # fmt: skip
def test_the_shard_is_that_of_the_blake2b_hash(question_id, digest):
    """Digests by `b2sum -l 64`; 4096 shards are their last three hexadecimal digits."""
    assert NUM_SHARDS == 0x1000
    assert shard_of(question_id) == digest & 0xFFF


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 100, NUM_SHARDS])
def test_ranks_own_contiguous_ranges_of_almost_equal_size(ranks):
    owners = [owner_of(shard, ranks) for shard in range(NUM_SHARDS)]
    assert owners == sorted(owners)
    sizes = Counter(owners)
    assert set(sizes) == set(range(ranks))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_more_ranks_than_shards_leave_some_without_any():
    assert {owner_of(shard, 2 * NUM_SHARDS) for shard in range(NUM_SHARDS)} == set(range(0, 2 * NUM_SHARDS, 2))


def test_questions_are_spread_evenly():
    """30,000 ids over 64 ranks: mean 469, standard deviation 21.5; none is five of them away."""
    counts = Counter(owner_of(shard_of(f"question {i}"), 64) for i in range(30_000))
    assert len(counts) == 64
    assert all(abs(count - 30_000 / 64) < 5 * 21.5 for count in counts.values())
