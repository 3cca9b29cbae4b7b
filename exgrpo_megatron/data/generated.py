"""What the embedded tasks have in common: distinct questions, each on one side of training and held-out ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Container, Sequence
from typing import Protocol, TypeVar

from exgrpo_megatron.errors import DataError

HELD_OUT_ONE_IN = 5
"""One question in this many is a held-out one."""

_GIVE_UP_AFTER = 2000
"""Draws in a row without a new question, after which there are taken to be no more."""


class Generated(Protocol):
    """A question of an embedded task."""

    @property
    def text(self) -> str: ...


Q = TypeVar("Q", bound=Generated)


def distinct_questions(
    draw: Callable[[int], Q],
    size: int,
    difficulties: Sequence[int],
    *,
    held_out: bool,
    exclude: Container[str],
    what: str,
) -> list[Q]:
    """`size` questions of `draw(difficulty)`, the difficulties in turn, whose texts are distinct and not in `exclude`.

    Raises:
        DataError: there are not as many; `what` says how questions and difficulties are called.
    """
    questions: list[Q] = []
    seen: set[str] = set()
    for index in range(size):
        difficulty = difficulties[index % len(difficulties)]
        question = _draw_new(draw, difficulty, held_out, seen, exclude)
        if question is None:
            raise DataError(
                f"generator_size = {size} with generator_difficulties = {list(difficulties)} asks for more "
                f"{what.format(difficulty)} than can be found ({len(questions)} questions were); lower generator_size, "
                "or add difficulties"
            )
        seen.add(question.text)
        questions.append(question)
    return questions


def draw_for_training(draw: Callable[[int], Q], rng: random.Random, difficulties: Sequence[int]) -> Q:
    """A question that is not a held-out one, each difficulty alike."""
    difficulty = difficulties[rng.randrange(len(difficulties))]
    while is_held_out((question := draw(difficulty)).text):
        pass
    return question


def is_held_out(text: str) -> bool:
    """Whether a question belongs to the held-out ones: by a hash of its text, so that no seed can mix them up."""
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _draw_new(
    draw: Callable[[int], Q], difficulty: int, held_out: bool, seen: set[str], exclude: Container[str]
) -> Q | None:
    for _ in range(_GIVE_UP_AFTER):
        question = draw(difficulty)
        if is_held_out(question.text) == held_out and question.text not in seen and question.text not in exclude:
            return question
    return None
