"""Seeds that depend on names alone, so that no draw depends on ranks, batches or what was drawn before."""

from __future__ import annotations

import hashlib

import numpy as np


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' texts in order: the same on every machine, rank and resume."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stable_seeds(count: int, *parts: object) -> tuple[int, ...]:
    """`stable_seed(*parts, 0)`, `stable_seed(*parts, 1)` and so on; what they have in common is hashed once."""
    common = hashlib.blake2b("".join(f"{part}/" for part in parts).encode(), digest_size=8)
    seeds = []
    for index in range(count):
        each = common.copy()
        each.update(b"%d" % index)
        seeds.append(int.from_bytes(each.digest(), "big") >> 1)
    return tuple(seeds)


def generator(run_seed: int, step: int, name: str) -> np.random.Generator:
    """The random numbers of one step for one purpose."""
    return np.random.default_rng(stable_seed(run_seed, step, name))
