"""An embedded task: chains of additions and subtractions, worked out line by line.

A chain of n terms such as "7+5-3" is a question of difficulty n; its worked solution has one line an operation and the
result in a box. Every term is one digit, 1 to 9, and no partial result is negative. Every chain is either a training or
a held-out question, by a hash of its text, so that the two sets share none whatever their seeds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from exgrpo_megatron.data.generated import distinct_questions, draw_for_training

GUESS_OFFSETS = (0, 0, 1, -1, 2, -2, 3, -3, 5, -5)
"""What a guess may be off by, each alike: right in 2 of 10."""


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
    return distinct_questions(
        lambda num_terms: draw(rng, num_terms), size, difficulties,
        held_out=held_out, exclude=exclude, what="chains of {} terms",
    )  # fmt: skip


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
    return draw_for_training(lambda num_terms: draw(rng, num_terms), rng, difficulties)


def guess(rng: random.Random, chain: Chain) -> str:
    """A bare box with a number near the answer, which is right in about 2 of 10."""
    offset = GUESS_OFFSETS[rng.randrange(len(GUESS_OFFSETS))]
    return boxed(max(0, int(chain.answer) + offset))


def worked(text: str) -> str:
    """The worked solution of a question such as "7+5-3"."""
    total, lines = int(_TERM.match(text).group()), []  # type: ignore[union-attr]
    for term in _SIGNED_TERM.findall(text):
        result = total + int(term)
        lines.append(f"{total}{term}={result}")
        total = result
    return "\n".join([*lines, boxed(total)])


def partial_credit(*, question: str, response: str, answer: str) -> float:
    """A reward between 0 and 1 (`env.reward_function`): half for the right box at the end, half for the working, in
    proportion to its lines that are right before the first that is not."""
    given, wanted = response.split("\n"), worked(question).split("\n")[:-1]
    right = [line == expected for line, expected in zip(given, wanted, strict=False)]
    num_right = (*right, False).index(False)
    return 0.5 * (given[-1] == f"\\boxed{{{answer}}}") + 0.5 * num_right / len(wanted)


def boxed(number: int) -> str:
    """The number as a final answer."""
    return f"\\boxed{{{number}}}"


_TERM = re.compile(r"\d+")
_SIGNED_TERM = re.compile(r"[+-]\d+")


def _operand(rng: random.Random) -> int:
    return rng.randint(1, 9)
