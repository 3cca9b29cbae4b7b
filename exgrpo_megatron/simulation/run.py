"""A whole simulated run: the trainer on simulated parts, and what of its metrics means anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.build import build_experience
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import AnswerChoice, Config, DemonstrationsConfig, RepoConfig
from exgrpo_megatron.data.order import QuestionOrder
from exgrpo_megatron.data.questions import QuestionSet
from exgrpo_megatron.experience.encoding import encode
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.selection import needs_scoring, needs_tokens
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.rollout.protocol import SamplingParams
from exgrpo_megatron.simulation.learner import Growth, Learner
from exgrpo_megatron.simulation.rates import Rates
from exgrpo_megatron.simulation.world import (
    TOKENS,
    SimulatedEngine,
    SimulatedPolicy,
    SimulatedTokenizer,
    SimulatedVerifier,
    simulated_answer,
    simulated_question,
)
from exgrpo_megatron.trainer import StepResult, Trainer
from exgrpo_megatron.types import StoredAnswer

MEANINGFUL = (
    "reward/pass_rate", "groups/", "experience/", "data/", "freshness/", "alarm/", "budget/", "replay_step/answers",
    "replay_step/mean_weight", "replay_step/mean_age_steps",
)  # fmt: skip
"""Beginnings of the metrics that a simulated run can tell."""
MEANINGLESS = ("experience/shard_answers", "experience/padded_logprobs", "budget/tokens")


@dataclass(frozen=True)
class Assumptions:
    """What a simulation takes for granted beside the recipe."""

    growth: Growth = field(default_factory=Growth)
    distinct: int | None = None
    """Different right answers of a question; None: no two answers are alike."""
    answer_bytes: float = 3000.0
    """Of a stored answer on disk."""


@dataclass(frozen=True)
class Simulated:
    """What a simulated run did."""

    config: Config
    """The recipe as it was asked for."""
    num_questions: int
    records: list[dict[str, float]]
    """A dict of metrics a step, under the names of a real run's, with its "step"."""
    true_rates: list[float]
    """Mean true pass rate over all questions after each step."""
    warnings: list[str]
    """What the trainer warned of, with the step."""
    events: list[tuple[int, list[Event]]]
    """What happened to the questions, step by step, if it was asked for."""


def simulate(
    config: Config,
    rates: Rates,
    assumptions: Assumptions,
    *,
    after_step: Callable[[int], object] | None = None,
    keep_events: bool = False,
) -> Simulated:
    """`grpo.max_num_steps` steps of the recipe on questions of these pass rates; equal seeds give equal runs.

    Raises:
        DataError: there are fewer questions than a step needs.
    """
    learner = Learner(rates.values, assumptions.growth, rates.curve)
    logger = config.logger.model_copy(update={"experience_history": keep_events})
    parts = _parts(config.model_copy(update={"logger": logger}), learner, assumptions)
    records: list[dict[str, float]] = []
    true_rates: list[float] = []
    warnings: list[str] = []
    events: list[tuple[int, list[Event]]] = []

    def keep(result: StepResult) -> bool:
        records.append({"step": result.step, **_metrics(result, assumptions.answer_bytes)})
        true_rates.append(learner.mean_rate)
        warnings.extend(f"step {result.step}: {warning}" for warning in result.warnings)
        events.append((result.step, result.events))
        if after_step is not None:
            after_step(result.step)
        return True

    Trainer(parts).fit(config.grpo.max_num_steps, keep)
    parts.experience.close()
    return Simulated(config, len(rates.values), records, true_rates, warnings, events)


def not_simulated(config: Config) -> list[str]:
    """What the recipe asks for and a simulation leaves out."""
    experience, left_out = config.experience, []
    if experience.prefill_path is not None:
        left_out.append("experience.prefill_path: the run begins without stored answers")
    choices = {
        "experience.answer_choice": (experience.answer_choice, experience.in_groups),
        "experience.replay_step.answer_choice": (experience.replay_step.answer_choice, experience.in_steps),
    }
    for key, (choice, used) in choices.items():
        if used and _looks_into_answers(choice):
            left_out.append(f"{key} = {choice}: drawn at random, as simulated answers have no text and no policy")
    if experience.entropy_percentile is not None or experience.eviction == "highest_entropy":
        left_out.append("experience.entropy_percentile, eviction: simulated answers have an entropy by chance")
    if experience.difficulty_per_category:
        left_out.append("experience.difficulty_per_category: simulated questions have no category")
    others = {
        "demonstrations: every answer is sampled": config.demonstrations.enabled,
        "repo: there are no off-policy groups": config.repo.enabled,
        "env.reward_function: rewards are 0 and 1": config.env.reward_function is not None,
        "data.train.pass_rates_path: all questions of --rates take part": config.data.train.pass_rates_path is not None,
        "data.validation: nothing is evaluated": config.data.validation is not None,
    }
    return [*left_out, *(text for text, asked in others.items() if asked)]


def simulated_config(config: Config, answer_bytes: float) -> Config:
    """The recipe without what only a model could answer, and with a limit of bytes that suits the short answers."""
    loss = config.loss_fn.model_copy(update={"old_logprobs": "engine", "use_importance_sampling_correction": False})
    changed: dict[str, Any] = {"stored_answer": "tokens", "prefill_path": None}
    if _looks_into_answers(config.experience.answer_choice):
        changed["answer_choice"] = "random"
    if _looks_into_answers(config.experience.replay_step.answer_choice):
        changed["replay_step"] = config.experience.replay_step.model_copy(update={"answer_choice": "random"})
    if config.experience.max_bytes is not None:
        changed["max_bytes"] = max(1, round(config.experience.max_bytes * record_bytes() / answer_bytes))
    experience = config.experience.model_copy(update=changed)
    others = {"demonstrations": DemonstrationsConfig(), "repo": RepoConfig()}
    return config.model_copy(update={"loss_fn": loss, "experience": experience, **others})


def record_bytes() -> int:
    """Of a simulated answer in the buffer."""
    return len(encode(simulated_question(0).id, 0, StoredAnswer(*simulated_answer(0), 0, 0)))


def _looks_into_answers(choice: AnswerChoice | None) -> bool:
    return choice is not None and (needs_scoring(choice, 2) or needs_tokens(choice, 2))


def _parts(config: Config, learner: Learner, assumptions: Assumptions) -> Parts:
    used = simulated_config(config, assumptions.answer_bytes)
    questions = tuple(simulated_question(number) for number in range(len(learner.logits)))
    assert used.data.epoch_order is not None
    comm = SingleProcess()
    rng = np.random.default_rng(stable_seed(config.grpo.seed, "simulation"))
    return Parts(
        config=used,
        comm=comm,
        policy=SimulatedPolicy(learner, used),
        engine=SimulatedEngine(learner, rng, assumptions.distinct),
        verifier=SimulatedVerifier(),
        tokenizer=SimulatedTokenizer(),
        order=QuestionOrder(questions, used.grpo.seed, used.data.epoch_order),
        experience=build_experience(used, questions, comm, None),
        train=QuestionSet(questions, "simulated", "simulation", (), (), 0),
        validation=(),
        sampling=SamplingParams(TOKENS, used.policy.generation.temperature, (1,)),
        model_dir=Path(),
    )


def _metrics(result: StepResult, answer_bytes: float) -> dict[str, float]:
    kept = {
        name: value for name, value in result.metrics.items() if name.startswith(MEANINGFUL) and name not in MEANINGLESS
    }
    if "experience/stored_bytes" in kept:
        kept["experience/stored_bytes"] = round(kept["experience/stored_answers"] * answer_bytes)
    return kept
