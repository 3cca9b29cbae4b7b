"""A run from start to end: resume or begin, train with checkpoints, evaluate, export, and leave on a signal."""

from __future__ import annotations

import fcntl
import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from exgrpo_megatron import build
from exgrpo_megatron.build import Inputs, writable_folder
from exgrpo_megatron.checkpointing import CheckpointStore, read_state
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.evaluator import Evaluation, Evaluator
from exgrpo_megatron.metrics import JsonlSink, MetricSink, MetricsLogger, TensorBoardSink
from exgrpo_megatron.parts import Reporter
from exgrpo_megatron.prefill import check_prefill_exists, load_prefill
from exgrpo_megatron.recipe import changed_keys, dump_recipe
from exgrpo_megatron.trainer import StepResult, Trainer

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor

log = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
METRICS_FILE = "metrics.jsonl"


class StopSignal:
    """SIGTERM or Ctrl-C asks for a clean stop after the current step; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handles the signals inside the block."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass(frozen=True)
class RunOutcome:
    """Where a training run ended and what it left."""

    log_dir: Path
    last_step: int
    finished: bool
    """False where a signal stopped it before the last step."""
    checkpoint: Path | None
    export: Path | None


class TrainingRun:
    """One RL run in its folder. Every method is collective over the data-parallel ranks."""

    def __init__(
        self, config: Config, inputs: Inputs, start_from: Path, comm: Communicator, reporter: Reporter
    ) -> None:
        self.config, self.inputs, self.comm, self.reporter = config, inputs, comm, reporter
        self.log_dir = Path(config.logger.log_dir)
        self.store = checkpoint_store(config, comm)
        checkpoint = self.store.latest() if config.checkpointing.enabled else None
        if checkpoint is None:
            check_prefill_exists(config)
        self.actor: MegatronActor = build.build_rl_actor(config, inputs.model_dir if checkpoint else start_from, comm)
        self.parts = build.build_parts(config, inputs, self.actor, comm)
        self.trainer = Trainer(self.parts)
        self.evaluator: Evaluator | None = build.build_evaluator(
            config, inputs, self.parts.engine, self.parts.verifier, comm
        )
        self.last_checkpoint = checkpoint
        if checkpoint:
            self._resume(checkpoint)
        elif config.experience.enabled and config.experience.prefill_path:
            reporter.note(load_prefill(self.parts, Path(config.experience.prefill_path)))

    def run(self, stop: StopSignal) -> RunOutcome:
        """Trains to the last step or the stop signal, then evaluates and exports; closes what it opened."""
        with ExitStack() as stack:
            stack.callback(self.parts.verifier.close)
            stack.callback(self.parts.engine.close)
            metrics = stack.enter_context(open_metrics(self.config, self.comm, self.trainer.last_step))
            self._report_start()
            if self.trainer.last_step == 0 and self.config.grpo.val_at_start and self.evaluator:
                self.trainer.push_weights()
                metrics.write(0, self._evaluate().metrics)
            self.trainer.fit(self.config.grpo.max_num_steps, self._after_step(metrics, stop))
            finished = self.trainer.last_step >= self.config.grpo.max_num_steps
            export = self._export() if finished and self.config.checkpointing.export_hf else None
        return RunOutcome(self.log_dir, self.trainer.last_step, finished, self.last_checkpoint, export)

    def _after_step(self, metrics: MetricsLogger, stop: StopSignal) -> Callable[[StepResult], bool]:
        config = self.config

        def after_step(result: StepResult) -> bool:
            last = result.step == config.grpo.max_num_steps
            due = config.grpo.val_period and result.step % config.grpo.val_period == 0
            values = {**result.metrics, **(self._evaluate().metrics if due or last else {})}
            metrics.write(result.step, values)
            self.reporter.step_line(values)
            for warning in result.warnings:
                self.reporter.note(f"step {result.step}: {warning}")
            stopping = any(self.comm.all_gather(stop.requested))
            if config.checkpointing.enabled and (
                last or stopping or result.step % config.checkpointing.save_period == 0
            ):
                self._save(values)
            return not stopping

        return after_step

    def _evaluate(self) -> Evaluation:
        return self.evaluator.run() if self.evaluator else Evaluation({}, [])

    def _save(self, values: dict[str, float]) -> None:
        def write_parts(folder: Path) -> None:
            self.actor.save(folder / "policy")
            if self.comm.rank == 0:
                self.parts.experience.save(folder / "experience")
                (folder / RECIPE_FILE).write_text(dump_recipe(self.config), encoding="utf-8")

        state = {
            **self.trainer.state_dict(),
            "data_fingerprint": self.inputs.train.fingerprint,
            "variant": self.config.variant_table(),
            "recipe": self.config.model_dump(mode="json"),
            "metrics": {name: value for name, value in values.items() if name.startswith("validation/")},
        }
        self.last_checkpoint = self.store.save(self.trainer.last_step, state, write_parts)

    def _resume(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        if state["data_fingerprint"] != self.inputs.train.fingerprint:
            raise CheckpointError(
                f"{checkpoint} was trained on other questions: its data fingerprint is {state['data_fingerprint']}, "
                f"the recipe's data.train now has {self.inputs.train.fingerprint}. Restore the data, or start a new "
                f"run with another logger.log_dir"
            )
        self.actor.load(checkpoint / "policy")
        self.parts.experience.load(checkpoint / "experience")
        self.trainer.load_state_dict(state)
        self.reporter.note(f"resuming from {checkpoint}")
        for line in changed_keys(state["recipe"], self.config.model_dump(mode="json")):
            self.reporter.note(f"the recipe changed since then: {line}")

    def _report_start(self) -> None:
        note = self.reporter.note
        train, held_out = self.inputs.train, self.inputs.validation
        note(f"questions: {train.describe()}" + (f"; held out: {held_out.describe()}" if held_out else ""))
        note(f"variant {self.config.variant}: see {self.log_dir / RECIPE_FILE} for the switches in force")
        if self.config.experience.stored_answer == "text":
            note("experience.stored_answer = text: log-probs are padded with zeros, as in the released code")

    def _export(self) -> Path:
        from exgrpo_megatron.policy.export import export_hf  # noqa: PLC0415

        report = export_hf(self.actor, self.log_dir / "hf", self.inputs.model_dir)
        self.reporter.note(f"export checked: {report}")
        return self.log_dir / "hf"


def checkpoint_store(config: Config, comm: Communicator) -> CheckpointStore:
    """The checkpoints of the recipe's run."""
    folder = Path(config.checkpointing.checkpoint_dir or Path(config.logger.log_dir) / "checkpoints")
    return CheckpointStore(folder, config.checkpointing, comm)


def warm_start(config: Config, inputs: Inputs, comm: Communicator, reporter: Reporter, stop: StopSignal) -> Path | None:
    """The folder of the kept warm start, trained now if it is not there; None where a signal stopped it."""
    folder = build.warm_start_dir(config, inputs)
    if (folder / "config.json").is_file():
        reporter.note(f"warm start: reusing {folder}")
        return folder
    reporter.note(f"warm start: {config.sft.max_num_steps} supervised steps, kept in {folder}")
    return supervised_run(config, inputs, folder, comm, reporter, stop)


def supervised_run(
    config: Config, inputs: Inputs, export_to: Path, comm: Communicator, reporter: Reporter, stop: StopSignal
) -> Path | None:
    """Supervised fine-tuning, exported to `export_to`; None where a signal stopped it before the end."""
    from exgrpo_megatron.policy.export import export_hf  # noqa: PLC0415

    trainer, actor = build.build_sft(config, inputs, comm)
    log_dir = Path(config.logger.log_dir) / "sft"
    with open_metrics(config, comm, 0, log_dir) as metrics:

        def after_step(step: int, values: dict[str, float]) -> bool:
            metrics.write(step, values)
            reporter.advance(f"loss {values['sft/loss']:.3f}")
            return not any(comm.all_gather(stop.requested))

        trainer.fit(after_step)
    if trainer.last_step < trainer.max_num_steps:
        return None
    export_hf(actor, export_to, inputs.model_dir)
    return export_to


@contextmanager
def open_metrics(
    config: Config, comm: Communicator, last_step: int, log_dir: Path | None = None
) -> Iterator[MetricsLogger]:
    """The run's metrics files on rank 0, with the lines after `last_step` dropped; nothing on the others."""
    folder = log_dir or Path(config.logger.log_dir)
    sinks: list[MetricSink] = []
    if comm.rank == 0:
        sinks.append(JsonlSink(folder / METRICS_FILE))
        if config.logger.tensorboard_enabled:
            sinks.append(TensorBoardSink(folder / "tensorboard"))
    for sink in sinks:
        sink.truncate_after(last_step)
    logger = MetricsLogger(sinks)
    try:
        yield logger
    finally:
        logger.close()


@contextmanager
def run_folder(config: Config, comm: Communicator) -> Iterator[Path]:
    """The run's folder, made, holding the resolved recipe, and locked against a second run."""
    folder = writable_folder(Path(config.logger.log_dir), "logger.log_dir")
    if comm.rank != 0:
        yield folder
        return
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"logger.log_dir = {str(folder)!r}: another run is writing there") from None
        (folder / RECIPE_FILE).write_text(dump_recipe(config), encoding="utf-8")
        yield folder


def evaluate_checkpoint(config: Config, inputs: Inputs, checkpoint: Path, comm: Communicator) -> Evaluation:
    """Held-out pass rates of a run's checkpoint or of a Hugging Face folder."""
    if not inputs.held_out:
        raise ConfigError("data.validation: required for an evaluation, but not set")
    engine = build.build_engine(config, inputs.architecture)
    engine.load_weights(_weights_of(config, inputs, checkpoint, comm), version=0)
    verifier = build.build_verifier(config)
    try:
        evaluator = build.build_evaluator(config, inputs, engine, verifier, comm)
        assert evaluator is not None
        return evaluator.run()
    finally:
        verifier.close()
        engine.close()


def _weights_of(config: Config, inputs: Inputs, checkpoint: Path, comm: Communicator) -> Iterator[tuple[str, Any]]:
    if (checkpoint / "config.json").is_file():
        found = build.read_architecture(checkpoint)
        if found != inputs.architecture:
            raise CheckpointError(f"{checkpoint}: {found} is not the recipe's model, {inputs.architecture}")
        reader = build.HFReader(checkpoint)
        return ((name, reader.get(name)) for name in reader.names())
    read_state(checkpoint)
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    actor.load(checkpoint / "policy")
    return actor.export_weights()


def write_evaluation(evaluation: Evaluation, path: Path, about: dict[str, Any]) -> None:
    """Metrics as JSON at `path`, and every graded answer beside it as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "metrics": evaluation.metrics}, indent=1), encoding="utf-8")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.answers)
    path.with_suffix(".answers.jsonl").write_text(rows, encoding="utf-8")
