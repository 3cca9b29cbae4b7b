"""What a run says about its questions before it trains on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

from exgrpo_megatron import build
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.questions import check_disjoint
from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.parts import Verifier
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.types import Question

SHOWN = 5
"""Questions named in a warning."""


def describe_questions(inputs: Inputs) -> Iterator[str]:
    """A line a set: how many, what was left out and why; and how many stand in both sets, which none should."""
    yield f"training questions: {inputs.train.describe()}"
    for name, questions in inputs.sets.items():
        yield f"set {name}: {questions.describe()}"
    if inputs.validation is None:
        return
    yield f"held-out questions: {inputs.validation.describe()}"
    shared = check_disjoint(inputs.train, inputs.validation)
    if shared:
        yield (
            f"warning: {shared} of the {len(inputs.held_out)} held-out questions are training questions too, so the "
            f"held-out pass rate flatters the model; take them out of data.train or data.validation"
        )


def check_best_checkpoint(config: Config, inputs: Inputs) -> Iterator[str]:
    """A line where checkpoints are saved whose steps are not evaluated, so that they can never be the best.

    Raises:
        ConfigError: checkpointing.metric_name is of a category that no held-out question has.
    """
    if not (inputs.validation or inputs.sets) or not config.checkpointing.enabled:
        return
    name, saved, evaluated = config.checkpointing.metric_name, config.checkpointing.save_period, config.grpo.val_period
    category = name.removeprefix("validation/").partition("/")[2]
    there = sorted({question.category for question in inputs.held_out if question.category is not None})
    if name.startswith("validation/pass_rate_") and category and category not in there:
        raise ConfigError(
            f"checkpointing.metric_name = {name}: no held-out question has the category {category!r}; there are "
            f"{', '.join(map(repr, there)) or 'none (data.validation.category_key)'}"
        )
    if not evaluated or saved % evaluated:
        often = f"every {math.lcm(saved, evaluated)} steps, and at the end," if evaluated else "at the end alone"
        yield (
            f"best checkpoint: grpo.val_period = {evaluated} and checkpointing.save_period = {saved}, so that {often} "
            f"there is one that can be the best in {name}"
        )


def check_gold_answers(config: Config, inputs: Inputs, comm: Communicator) -> Iterator[str]:
    """A warning a set whose gold answers the verifier does not all accept as equal to themselves; not collective.

    Raises:
        DataError: it accepts none of the training answers, so nothing could be learned.
    """
    with closing(build.build_verifier(config, comm)) as verifier:
        refused = _refused(verifier, inputs.train.questions)
        if len(refused) == len(inputs.train.questions):
            raise DataError(
                f"no gold answer of {inputs.train.source} is accepted as equal to itself ({_shown(refused)}), so no "
                f"response can be rewarded; {_REMEDY}"
            )
        free = {name: held.questions for name, held in inputs.sets.items() if not config.eval.sets[name].choices_key}
        others = {"held-out": inputs.held_out, **{f"{name} (eval.sets)": found for name, found in free.items()}}
        for kind, questions, found in (
            ("training", inputs.train.questions, refused),
            *((kind, questions, _refused(verifier, questions)) for kind, questions in others.items()),
        ):
            if found:
                yield (
                    f"warning: {len(found)} of {len(questions)} {kind} gold answers are not accepted as equal to "
                    f"themselves, so no response to these questions can be rewarded: {_shown(found)}; {_REMEDY}"
                )


_REMEDY = (
    "correct the answers (answer_key, answer_marker), or see whether env.math.require_literal or "
    "env.math.max_boxed_chars forbids them"
)


def _refused(verifier: Verifier, questions: tuple[Question, ...]) -> list[Question]:
    return [questions[index] for index in verifier.check_gold([question.answer for question in questions])]


def _shown(questions: list[Question]) -> str:
    some = ", ".join(f"{question.id} ({question.answer[:40]!r})" for question in questions[:SHOWN])
    return some + (", ..." if len(questions) > SHOWN else "")
