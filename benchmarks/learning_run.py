"""One run of benchmarks/learning.py: the real trainer in this process, looked at after every so many answers."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from learning_settings import EVALUATE_EVERY, TASKS, Setting
from learning_studies import Study, StudyTrainer

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.evaluator import Evaluator
from exgrpo_megatron.parts import SilentReporter
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.stop import StopSignal
from exgrpo_megatron.trainer import StepResult, Trainer

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Longer than any run: the learning rate is constant, and answers end a run.
_MAX_STEPS = 100_000


@dataclass
class Measured:
    """A finished run; the lists have one value an evaluation, the first before any step."""

    task: str
    setting: str
    seed: int
    identity: str
    """Of the recipe as it was run: a line of another one does not count."""
    answers: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the training steps."""
    t1: list[float] = field(default_factory=list)
    greedy: list[float] = field(default_factory=list)
    informative: list[float] = field(default_factory=list)
    """Share of the groups of new answers since the evaluation before in which some are right and some wrong."""
    stored_answers: list[int] = field(default_factory=list)
    skipped_updates: int = 0
    noted: dict[str, list[float]] = field(default_factory=dict)
    """What `StudyTrainer.noted` says."""


def configured(setting: Setting, seed: int, out: Path) -> Config:
    """The recipe of a run; raises ConfigError, DataError where a key is not there."""
    task = TASKS[setting.task]
    return load_recipe(
        RECIPES / setting.recipe,
        [
            f"grpo.max_num_steps={_MAX_STEPS}",
            f"logger.log_dir={out / 'work' / setting.task}",
            f"sft.warm_start_dir={out / 'warm_starts'}",
            *task.overrides,
            *(override.format(seed=seed, far=1000 + seed) for override in task.seeded),
            *setting.overrides,
        ],
    )


def identity(config: Config, setting: Setting) -> str:
    """What a run depends on, hashed; not where it lies."""
    # Defaults are left out, so that a key that did not exist then makes no other run of it.
    left_out = {"logger": True, "checkpointing": True, "sft": {"warm_start_dir"}}
    dumped = config.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
    changed = asdict(setting.study).items() - asdict(Study()).items() if setting.study else ()
    studied = [sorted(changed)] if changed else []
    text = json.dumps([dumped, setting.answers, EVALUATE_EVERY, *studied], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def warm_start(config: Config, comm: Communicator) -> tuple[run_inputs.Inputs, Path]:
    """What a run reads, and the model folder it begins with: the kept warm start, made now if it is not there."""
    inputs = run_inputs.load_inputs(config, comm)
    folder = supervised.warm_start(config, inputs, comm, SilentReporter(), StopSignal())
    if folder is None:
        raise UserError("stopped during the warm start")
    return inputs, folder


def run(config: Config, setting: Setting, seed: int, comm: Communicator) -> Measured:
    """Train from the warm start until the setting's number of answers."""
    inputs, start = warm_start(config, comm)
    actor = build.build_rl_actor(config, start, comm)
    parts = build.build_parts(config, inputs, actor, comm)
    evaluator = build.build_evaluator(config, inputs, parts.engine, parts.verifier, comm)
    assert evaluator is not None
    measured = Measured(setting.task, setting.name, seed, identity(config, setting))
    try:
        trainer = StudyTrainer(parts, setting.study) if setting.study else Trainer(parts)
        _train(trainer, evaluator, setting.answers, measured)
    finally:
        parts.verifier.close()
        parts.engine.close()
        parts.experience.close()
    return measured


def _train(trainer: Trainer, evaluator: Evaluator, until: int, measured: Measured) -> None:
    trainer.push_weights()
    answers, cpu_s, due, since = 0, 0.0, 0, list[StepResult]()
    while True:
        if answers >= due:
            _look(evaluator, measured, answers, cpu_s, since)
            for name, value in (trainer.noted() if isinstance(trainer, StudyTrainer) else {}).items():
                measured.noted.setdefault(name, []).append(value)
            due, since = (answers // EVALUATE_EVERY + 1) * EVALUATE_EVERY, []
            if answers >= until:
                measured.skipped_updates = trainer.skipped_updates
                return
        begun = time.process_time()
        since.append(trainer.step())
        cpu_s += time.process_time() - begun
        answers += num_new(since[-1])


def num_new(result: StepResult) -> int:
    """Answers sampled in a step."""
    return sum(not member.replayed for group in result.groups for member in group.trajectories)


def _look(evaluator: Evaluator, measured: Measured, answers: int, cpu_s: float, since: Sequence[StepResult]) -> None:
    metrics = evaluator.run().metrics
    measured.answers.append(answers)
    measured.cpu_s.append(cpu_s)
    measured.t1.append(metrics["validation/pass_rate_t1"])
    measured.greedy.append(metrics["validation/pass_rate_greedy"])
    shares = [result.metrics["groups/mixed"] for result in since]
    measured.informative.append(sum(shares) / len(shares) if shares else 0.0)
    measured.stored_answers.append(int(since[-1].metrics["experience/stored_answers"]) if since else 0)
