"""A run from start to end: resume or begin, train with checkpoints, evaluate, export, and leave on a signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_megatron import build
from exgrpo_megatron.agreement import AgreementGate
from exgrpo_megatron.checkpointing import FilesPart, Part, read_state
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.evaluator import Evaluator
from exgrpo_megatron.experience.history import HistoryWriter
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.loggers.content import answer_rows, run_outcome
from exgrpo_megatron.metric_sinks import AnswerRow, MetricsLogger, read_metrics
from exgrpo_megatron.parts import Reporter
from exgrpo_megatron.places import LOADING
from exgrpo_megatron.prefill import load_prefill
from exgrpo_megatron.recipe import changed_keys, dump_recipe
from exgrpo_megatron.report.console import evaluation_line
from exgrpo_megatron.report.model_card import TrainedModel
from exgrpo_megatron.run_folder import (
    METRICS_FILE,
    RECIPE_FILE,
    RunFolder,
    checkpoint_store,
    open_history,
    open_metrics,
)
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.stop import StopSignal
from exgrpo_megatron.supervised import what_goes_along
from exgrpo_megatron.trainer import StepResult, Trainer
from exgrpo_megatron.types import Question

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor


RECENT_FOLDER = "recent_answers"
"""Of a checkpoint, where the recipe has `repo`."""


@dataclass(frozen=True)
class RunOutcome:
    """Where a training run ended and what it left."""

    log_dir: Path
    last_step: int
    first_step: int
    """The step it began or went on after; equal to `last_step` where nothing was left to train."""
    finished: bool
    """False where a signal stopped it before the last step."""
    checkpoint: Path | None
    export: Path | None
    tools: Mapping[str, str] = field(default_factory=dict)
    """Where the loggers of others have it, by their title, and how to look; empty where nothing was left to train."""


class TrainingRun:
    """One RL run in its folder. Every method is collective over all processes."""

    def __init__(
        self, config: Config, inputs: Inputs, start_from: Path, comm: Communicator, reporter: Reporter
    ) -> None:
        self.config, self.inputs, self.comm, self.reporter = config, inputs, comm, reporter
        self.folder = RunFolder(config)
        self.data = inputs.data_record() if comm.is_main else {}
        self.store = checkpoint_store(config, comm)
        checkpoint = self.store.latest() if config.checkpointing.enabled else None
        state = check_state(checkpoint, inputs) if checkpoint else {}
        with comm.places.inside(LOADING):
            self.actor: MegatronActor = build.build_rl_actor(
                config, inputs.model_dir if checkpoint else start_from, comm
            )
            self.parts = build.build_parts(config, inputs, self.actor, comm, self.folder.experience)
        self.trainer = Trainer(self.parts)
        self.evaluator: Evaluator | None = build.build_evaluator(
            config, inputs, self.parts.engine, self.parts.verifier, comm
        )
        self.sets = build.build_sets_in_training(config, inputs, self.parts.engine, self.parts.verifier, comm)
        self.gate = AgreementGate(self.parts) if config.policy.generation.backend == "vllm" else None
        self.last_checkpoint = checkpoint
        self._told = False
        if self.parts.demonstrations:
            reporter.note(self.parts.demonstrations.describe())
        if checkpoint:
            with comm.places.inside(f"resuming from {checkpoint.name}"):
                self._resume(checkpoint, state)
        elif config.policy.init_from:
            self._begin_with(Path(config.policy.init_from))
        if not checkpoint and config.experience.enabled and config.experience.prefill_path:
            reporter.note(load_prefill(self.parts, Path(config.experience.prefill_path)))

    def run(self, stop: StopSignal) -> RunOutcome:
        """Trains to the last step or the stop signal, then evaluates and exports; closes what it opened."""
        with ExitStack() as stack:
            stack.callback(self.parts.verifier.close)
            stack.callback(self.parts.engine.close)
            stack.callback(self.parts.experience.close)
            first_step, until = self.trainer.last_step, self.config.grpo.max_num_steps
            compared: dict[str, float] = {}
            metrics = stack.enter_context(self._open_metrics())
            history = open_history(self.config, self.comm, first_step)
            if self.config.experience.stored_answer == "text":
                self.reporter.note("experience.stored_answer = text: log-probs are padded with zeros, as released")
            evaluates = self.config.grpo.val_at_start and (self.evaluator or self.sets)
            if first_step == 0 and evaluates and not self._stopping(stop):
                self.trainer.push_weights()
                metrics.write(0, {**self._compare(0, self.inputs.train.questions), **self._evaluate(0)})
            elif self.gate and first_step < until:
                self.trainer.push_weights()
                compared = self._compare(first_step, self.inputs.train.questions)
            if first_step < until and not self._stopping(stop):
                if self.comm.is_main:
                    self.folder.set_exported_step(None)
                with self.store.kept():
                    self.trainer.fit(until, self._after_step(metrics, history, stop, compared))
            finished = self.trainer.last_step >= until
            export = self._export(metrics) if finished and self.config.checkpointing.export_hf else None
            if finished:
                metrics.finish(partial(self._outcome, export), [export / "README.md"] if export else [])
        for line in metrics.lost():
            self.reporter.note(line)
        last_step, tools = self.trainer.last_step, metrics.look()
        return RunOutcome(self.folder.path, last_step, first_step, finished, self.last_checkpoint, export, tools)

    def _after_step(
        self, metrics: MetricsLogger, history: HistoryWriter | None, stop: StopSignal, before: dict[str, float]
    ) -> Callable[[StepResult], bool]:
        """`before`: measured before the next step, on whose line it is written: there is one a step."""
        config = self.config

        def after_step(result: StepResult) -> bool:
            nonlocal before
            last = result.step == config.grpo.max_num_steps
            due = config.grpo.val_period and result.step % config.grpo.val_period == 0
            self.reporter.step_line(result.metrics)
            for warning in result.warnings:
                self.reporter.note(f"step {result.step}: {warning}")
            if result.step == 1 or due or last:
                metrics.answers(result.step, partial(self._some_answers, result))
            compared = bool(self.gate and self.gate.due(result.step))
            values = {
                **result.metrics,
                **before,
                **(self._compare(result.step, [group.question for group in result.groups]) if compared else {}),
                **(self._evaluate(result.step) if due or last else {}),
            }
            metrics.write(result.step, values)
            if history:
                history.write(result.step, result.events)
            stopping, before = self._stopping(stop), {}
            if config.checkpointing.enabled:
                before, stopping = self._save_if_due(values, stop, last=last, stopping=stopping)
            return not stopping

        return after_step

    def _save_if_due(
        self, values: dict[str, float], stop: StopSignal, *, last: bool, stopping: bool
    ) -> tuple[dict[str, float], bool]:
        """After a step: how long saving took, and whether the run stops, which a signal may say only meanwhile."""
        leaving = last or stopping
        due = leaving or self.trainer.last_step % self.config.checkpointing.save_period == 0
        times = self._save(values, due=due, leaving=leaving)
        if leaving or not times or not self._stopping(stop):
            return times, stopping
        return times | self._save(values, due=not due, leaving=True), True

    def _stopping(self, stop: StopSignal) -> bool:
        stopping = self.comm.anywhere(stop.requested)
        if stopping and not stop.requested and not self._told:
            self._told = True
            self.reporter.note("another process of the run was told to stop, so all save and stop")
        return stopping

    def _evaluate(self, step: int) -> dict[str, float]:
        if self.evaluator is None and self.sets is None:
            return {}
        started = time.perf_counter()
        metrics = self.evaluator.run().metrics if self.evaluator else {}
        metrics = {**metrics, **(self.sets.run() if self.sets else {})}
        self.reporter.note(evaluation_line(step, metrics, self.config.eval.temperature))
        return {**metrics, "time/evaluate_s": time.perf_counter() - started}

    def _compare(self, step: int, questions: Sequence[Question]) -> dict[str, float]:
        """Engine against actor; raises UserError where they are too far apart and the recipe says to stop then."""
        if self.gate is None:
            return {}
        started = time.perf_counter()
        agreement = self.gate.compare(step, questions)
        if agreement.fault is not None:
            if self.gate.stops:
                raise UserError(agreement.fault)
            self.reporter.note(f"step {step}: {agreement.fault}")
        return {**agreement.metrics, "time/compare_s": time.perf_counter() - started}

    def _some_answers(self, result: StepResult) -> list[AnswerRow]:
        return answer_rows(result.groups, self.config.logger.num_answers, self.parts.tokenizer.decode)

    def _outcome(self, export: Path | None) -> dict[str, float | str]:
        return run_outcome(read_metrics(self.folder.path / METRICS_FILE), self.trainer.last_step, str(export or "none"))

    def _open_metrics(self) -> AbstractContextManager[MetricsLogger]:
        if self.comm.is_main:
            moved = self.folder.begin(self.trainer.last_step)
            if moved:
                self.reporter.note(f"the metrics of an earlier run without a checkpoint are kept as {moved}")
        return open_metrics(self.config, self.comm, self.trainer.last_step)

    def _save(self, values: dict[str, float], *, due: bool, leaving: bool) -> dict[str, float]:
        """Make the checkpoint before whole if it is written (wait for it where the next one is `due`), then begin that.

        `leaving`: there is no later moment, so it is made whole now. Returns how long that took.
        """
        started = time.perf_counter()
        times = self._finish_save(wait=due or leaving)
        if due:
            self.store.begin(self.trainer.last_step, self._state(values), self._snapshot)
            times |= self._finish_save(wait=leaving or not self.config.checkpointing.async_save)
        if due or times:
            times["time/save_s"] = time.perf_counter() - started
        return times

    def _finish_save(self, *, wait: bool) -> dict[str, float]:
        saved = self.store.finish(wait=wait)
        if saved is None:
            return {}
        self.last_checkpoint = saved.path
        return {"time/save_write_s": saved.write_s}

    def _snapshot(self, folder: Path) -> list[Part]:
        """What this process writes of a checkpoint."""
        parts: list[Part] = [
            self.actor.begin_save(folder / "policy", snapshot=self.config.checkpointing.async_save),
            FilesPart(partial(self.parts.experience.snapshot().save, folder / "experience")),
        ]
        recent = self.parts.recent
        if recent:
            parts.append(FilesPart(partial(recent.save, recent.snapshot(), folder / RECENT_FOLDER)))
        if self.comm.is_main:
            parts.append(FilesPart(partial(self._write_recipe, folder / RECIPE_FILE)))
        return parts

    def _write_recipe(self, path: Path) -> list[Path]:
        replace_text(path, dump_recipe(self.config))
        return [path]

    def _state(self, values: dict[str, float]) -> dict[str, Any]:
        return {
            **self.trainer.state_dict(),
            "data_fingerprint": self.inputs.train.fingerprint,
            "data": self.data,
            "variant": self.config.variant_table(),
            "recipe": self.config.model_dump(mode="json"),
            "metrics": {name: value for name, value in values.items() if name.startswith("validation/")},
        }

    def _resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        self.store.verify(checkpoint, excuse=self._may_be_damaged)
        self.actor.load(checkpoint / "policy")
        self.parts.experience.load(checkpoint / "experience")
        if self.parts.recent and (checkpoint / RECENT_FOLDER).is_dir():
            self.parts.recent.load(checkpoint / RECENT_FOLDER)
        elif self.parts.recent:
            self.reporter.note(
                "repo: the checkpoint keeps no answers (repo.enabled was false), so none are replayed yet"
            )
        self.trainer.load_state_dict(state)
        if self.parts.experience.num_damaged:
            self.reporter.note(f"experience: {self.parts.experience.num_damaged} answers lost to damaged files so far")
        self.reporter.note(f"resuming from {checkpoint}: {steps_text(state['step'], self.config.grpo.max_num_steps)}")
        for line in changed_keys(state["recipe"], self.config.model_dump(mode="json")):
            self.reporter.note(f"the recipe changed since then: {line}")

    def _begin_with(self, checkpoint: Path) -> None:
        """The weights of another run's checkpoint, and nothing else of it."""
        state = read_state(checkpoint)
        self.store.verify(checkpoint, excuse=lambda file: not file.startswith("policy/"))
        self.actor.begin_with(checkpoint / "policy")
        self.reporter.note(f"beginning with the weights of {checkpoint}, after its {state['step']} steps")

    def _may_be_damaged(self, file: str) -> bool:
        """Whether experience judges a file of a checkpoint by itself, and goes on without what is damaged in it."""
        quarantine = self.config.experience.on_corruption == "quarantine"
        return quarantine and file.startswith("experience/segments/")

    def _export(self, metrics: MetricsLogger) -> Path:
        from exgrpo_megatron.policy.export import export_hf  # noqa: PLC0415

        records = read_metrics(self.folder.path / METRICS_FILE) if self.comm.is_main else []
        trained = TrainedModel(
            self.config,
            self.trainer.last_step,
            self.data,
            self.inputs.train.fingerprint,
            records,
            logged=metrics.where(),
        )
        with self.comm.places.inside("export"):
            report = export_hf(
                self.actor, self.folder.export, self.inputs.model_dir, what_goes_along(self.inputs, trained)
            )
        if self.comm.is_main:
            self.folder.set_exported_step(self.trainer.last_step)
        self.reporter.note(f"exported to {self.folder.export} and checked: {report.describe()}")
        return self.folder.export


def finished_run(config: Config, inputs: Inputs, comm: Communicator) -> RunOutcome | None:
    """The outcome of a run of which nothing is left to do; None for any other. Raises as a resume would."""
    folder, checkpoint = RunFolder(config), checkpoint_store(config, comm).latest()
    if checkpoint is None or not config.checkpointing.enabled:
        return None
    step = check_state(checkpoint, inputs)["step"]
    export = folder.export if folder.exported_step() == step else None
    if step < config.grpo.max_num_steps or (config.checkpointing.export_hf and export is None):
        return None
    return RunOutcome(folder.path, step, step, True, checkpoint, export)


def steps_text(done: int, wanted: int) -> str:
    """How far a run is that may have been meant to be longer before."""
    if done > wanted:
        return f"{done} steps are done, more than grpo.max_num_steps = {wanted}"
    return f"{done} of {wanted} steps are done"


def steps_done(config: Config, comm: Communicator) -> int:
    """Steps in the checkpoint a run of this recipe would go on from; 0: it would begin."""
    latest = checkpoint_store(config, comm).latest() if config.checkpointing.enabled else None
    return read_state(latest)["step"] if latest else 0


def check_state(checkpoint: Path, inputs: Inputs) -> dict[str, Any]:
    """The checkpoint's state, of this data; raises CheckpointError."""
    state = read_state(checkpoint)
    if state["data_fingerprint"] != inputs.train.fingerprint:
        raise CheckpointError(
            f"{checkpoint} was trained on other questions: its data fingerprint is {state['data_fingerprint']}, "
            f"the recipe's data.train now has {inputs.train.fingerprint}. Restore the data, or start a new run with "
            f"another logger.log_dir"
        )
    return state
