"""Seeds from names."""

import hashlib

from exgrpo_megatron.algorithm.chance import stable_seed, stable_seeds


def test_a_seed_is_the_upper_63_bits_of_the_hash_of_the_joined_parts():
    digest = hashlib.blake2b(b"7/3/q1/True/0", digest_size=8).digest()
    assert stable_seed(7, 3, "q1", True, 0) == int.from_bytes(digest, "big") // 2


def test_other_parts_give_another_seed():
    assert len({stable_seed(1, 2, "a"), stable_seed(2, 1, "a"), stable_seed(1, 2, "b"), stable_seed(1, 2)}) == 4


def test_several_seeds_are_those_with_a_number_behind():
    assert stable_seeds(3, 7, 3, "q1", True) == tuple(stable_seed(7, 3, "q1", True, i) for i in range(3))
    assert stable_seeds(0, 7) == ()
