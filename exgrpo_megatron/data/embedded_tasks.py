"""The embedded tasks by the name of their generator: how a section of questions becomes questions and solutions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from exgrpo_megatron.config import DataSourceConfig
from exgrpo_megatron.data import chain_arithmetic, unknown_symbols


@dataclass(frozen=True)
class TaskQuestion:
    """A generated question, whatever its task."""

    text: str
    answer: str
    category: str
    """Its difficulty."""


@dataclass(frozen=True)
class EmbeddedTask:
    """What a generator gives."""

    questions: Callable[[DataSourceConfig, bool], list[TaskQuestion]]
    """The questions of a section, of the held-out side or the other; raises DataError where there are too few."""
    solution: Callable[[random.Random, DataSourceConfig, float], tuple[str, str]]
    """A random training question with a solution to learn, which shows its working in the given share of cases and
    is a bare guess in the others."""

    worked: Callable[[str], str] | None = None
    """The worked solution of a question, where its text is all that is needed."""


def task_of(source: DataSourceConfig) -> EmbeddedTask:
    """The task of a section that has a generator."""
    assert source.generator is not None
    return TASKS[source.generator]


def _chains(source: DataSourceConfig, held_out: bool) -> list[TaskQuestion]:
    chains = chain_arithmetic.generate(
        source.generator_size, source.generator_seed, source.difficulties, held_out=held_out
    )
    return [TaskQuestion(chain.text, chain.answer, str(chain.num_terms)) for chain in chains]


def _chain_solution(rng: random.Random, source: DataSourceConfig, worked_share: float) -> tuple[str, str]:
    chain = chain_arithmetic.draw_training(rng, source.difficulties)
    worked = rng.random() < worked_share
    return chain.text, chain.worked if worked else chain_arithmetic.guess(rng, chain)


def _symbols(source: DataSourceConfig, held_out: bool) -> list[TaskQuestion]:
    questions = unknown_symbols.generate(
        source.generator_size,
        source.generator_seed,
        source.difficulties,
        meanings=unknown_symbols.meanings(source.meaning_seed),
        held_out=held_out,
    )
    return [TaskQuestion(question.text, question.answer, str(question.num_letters)) for question in questions]


def _symbol_solution(rng: random.Random, source: DataSourceConfig, worked_share: float) -> tuple[str, str]:
    question = unknown_symbols.draw_training(rng, source.difficulties)
    worked = rng.random() < worked_share
    return question.text, question.worked if worked else unknown_symbols.guess(rng, question)


TASKS = {
    "chain_arithmetic": EmbeddedTask(_chains, _chain_solution, chain_arithmetic.worked),
    "unknown_symbols": EmbeddedTask(_symbols, _symbol_solution),
}
