"""An embedded task: a made-up notation that has to be worked out from right and wrong alone.

A question such as "9cd" is a digit and some letters; its difficulty is the number of letters. Each letter secretly
means one of six known shifts of a digit, A to F (modulo 10). The answer applies them in turn and boxes every partial
result, "9E=6\\n6B=9\\n\\\\boxed{69}": the shifts differ, so that a wrong reading is never right by luck. A base model
computes well but does not know the meanings: of each letter it believes the prior below, by which the true meaning has
8 to 25%. What it finds out about a letter helps with every question that has it, the held-out ones included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from exgrpo_megatron.data.generated import distinct_questions, draw_for_training

LETTERS = "abcdefghijkl"
SHIFTS = {"A": 1, "B": 3, "C": 4, "D": 6, "E": 7, "F": 9}
"""Name and amount of each shift."""

BELIEVED = (0.40, 0.22, 0.15, 0.12, 0.07, 0.04)
"""What the base model believes of each letter: these probabilities, in another order of the shifts for every letter."""

_LIKELY = (0.08, 0.25)
"""Believed probability of a true meaning: neither known from the start nor too rare to be found."""


@dataclass(frozen=True)
class SymbolQuestion:
    """One question of the task."""

    text: str
    """Such as "9cd"."""
    answer: str
    """All partial results, such as "69"."""
    worked: str
    """The solution line by line."""
    num_letters: int


def generate(
    size: int,
    seed: int,
    difficulties: Sequence[int],
    *,
    meanings: Mapping[str, str],
    held_out: bool,
    exclude: Container[str] = (),
) -> list[SymbolQuestion]:
    """`size` distinct questions under these meanings, with the numbers of letters in turn.

    The same arguments give the same questions everywhere; other meanings change the answers only.

    Raises:
        DataError: there are not as many questions.
    """
    rng = random.Random(seed)
    return distinct_questions(
        lambda num_letters: draw(rng, num_letters, meanings.__getitem__), size, difficulties,
        held_out=held_out, exclude=exclude, what="questions of {} letters",
    )  # fmt: skip


def draw(rng: random.Random, num_letters: int, reading: Callable[[str], str]) -> SymbolQuestion:
    """A random question, solved with the shift that `reading` gives for each letter."""
    digit, letters = rng.randrange(10), [LETTERS[rng.randrange(len(LETTERS))] for _ in range(num_letters)]
    value, lines, results = digit, [], ""
    for shift in map(reading, letters):
        result = (value + SHIFTS[shift]) % 10
        lines.append(f"{value}{shift}={result}")
        results += str(result)
        value = result
    return SymbolQuestion(
        f"{digit}{''.join(letters)}", results, "\n".join([*lines, f"\\boxed{{{results}}}"]), num_letters
    )


def draw_training(rng: random.Random, difficulties: Sequence[int]) -> SymbolQuestion:
    """A question that is not a held-out one, solved validly with readings from the prior: what a base model learns."""
    return draw_for_training(
        lambda num_letters: draw(rng, num_letters, lambda letter: _believed(rng, letter)), rng, difficulties
    )


def guess(rng: random.Random, question: SymbolQuestion) -> str:
    """A bare box with as many random digits."""
    return f"\\boxed{{{''.join(str(rng.randrange(10)) for _ in range(question.num_letters))}}}"


@cache
def prior() -> dict[str, dict[str, float]]:
    """Letter -> shift -> believed probability. The same everywhere and always: kept warm starts depend on it."""
    rng = random.Random("unknown symbols")
    return {letter: dict(zip(rng.sample(sorted(SHIFTS), len(SHIFTS)), BELIEVED, strict=True)) for letter in LETTERS}


def meanings(seed: int) -> dict[str, str]:
    """The hidden meaning of every letter: one to which the prior gives 8 to 25%."""
    rng = random.Random(f"meanings:{seed}")
    lowest, highest = _LIKELY
    return {
        letter: rng.choice([shift for shift, probability in believed.items() if lowest <= probability <= highest])
        for letter, believed in prior().items()
    }


def _believed(rng: random.Random, letter: str) -> str:
    believed = prior()[letter]
    return rng.choices(list(believed), list(believed.values()))[0]
