"""The embedded task: chains of additions and subtractions, worked out line by line.

A chain of n terms such as "7+5-3" is a question of difficulty n; its worked solution has one line an operation and the
result in a box. Every term is one digit, 1 to 9, and no partial result is negative. Every chain is either a training or
a held-out question, by a hash of its text, so that the two sets share none whatever their seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Sequence
from dataclasses import dataclass

from exgrpo_megatron.errors import DataError

HELD_OUT_ONE_IN = 5
"""One chain in this many is a held-out question."""
GUESS_OFFSETS = (0, 0, 1, -1, 2, -2, 3, -3, 5, -5)
"""What a guess may be off by, each alike: right in 2 of 10."""

_GIVE_UP_AFTER = 2000
"""Draws in a row without a new chain, after which there are taken to be no more."""


@dataclass(frozen=True)
class Chain:
    """One question of the task."""

    text: str
    """Such as "7+5-3"."""
    answer: str
    """Such as "9"."""
    worked: str
    """The solution line by line, such as "7+5=12\\n12-3=9\\n\\\\boxed{9}"."""
    num_terms: int


def generate(
    size: int, seed: int, difficulties: Sequence[int], *, held_out: bool, exclude: Container[str] = ()
) -> list[Chain]:
    """`size` distinct chains whose texts are not in `exclude`, with the numbers of terms in turn.

    The same arguments give the same chains everywhere; a larger `size` only appends.

    Raises:
        DataError: there are not as many chains.
    """
    rng = random.Random(seed)
    chains: list[Chain] = []
    seen: set[str] = set()
    for index in range(size):
        num_terms = difficulties[index % len(difficulties)]
        chain = _draw_new(rng, num_terms, held_out, seen, exclude)
        if chain is None:
            raise DataError(
                f"generator_size = {size} with generator_difficulties = {list(difficulties)} asks for more chains of "
                f"{num_terms} terms than can be found ({len(chains)} questions were); lower generator_size, or add "
                f"difficulties"
            )
        seen.add(chain.text)
        chains.append(chain)
    return chains


def draw(rng: random.Random, num_terms: int) -> Chain:
    """A random chain."""
    total = _operand(rng)
    text = str(total)
    lines = []
    for _ in range(num_terms - 1):
        operand = _operand(rng)
        sign = "-" if rng.random() < 0.5 and operand <= total else "+"
        result = total + operand if sign == "+" else total - operand
        text += f"{sign}{operand}"
        lines.append(f"{total}{sign}{operand}={result}")
        total = result
    return Chain(text, str(total), "\n".join([*lines, boxed(total)]), num_terms)


def draw_training(rng: random.Random, difficulties: Sequence[int]) -> Chain:
    """A random chain that is not a held-out question, each difficulty alike."""
    num_terms = difficulties[rng.randrange(len(difficulties))]
    while is_held_out((chain := draw(rng, num_terms)).text):
        pass
    return chain


def guess(rng: random.Random, chain: Chain) -> str:
    """A bare box with a number near the answer, which is right in about 2 of 10."""
    offset = GUESS_OFFSETS[rng.randrange(len(GUESS_OFFSETS))]
    return boxed(max(0, int(chain.answer) + offset))


def boxed(number: int) -> str:
    """The number as a final answer."""
    return f"\\boxed{{{number}}}"


def is_held_out(text: str) -> bool:
    """Whether a chain belongs to the held-out questions."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _draw_new(
    rng: random.Random, num_terms: int, held_out: bool, seen: set[str], exclude: Container[str]
) -> Chain | None:
    for _ in range(_GIVE_UP_AFTER):
        chain = draw(rng, num_terms)
        if is_held_out(chain.text) == held_out and chain.text not in seen and chain.text not in exclude:
            return chain
    return None


def _operand(rng: random.Random) -> int:
    return rng.randint(1, 9)
