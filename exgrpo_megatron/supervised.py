"""A supervised run from start to end: `exgrpo sft`, and the warm start of `exgrpo train`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exgrpo_megatron import build, warm_starts
from exgrpo_megatron.checkpointing import CheckpointStore, read_state
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import CheckpointConfig, Config
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.parts import Reporter
from exgrpo_megatron.places import LOADING
from exgrpo_megatron.report.model_card import TrainedModel, model_card
from exgrpo_megatron.run_folder import open_metrics
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.sft import SFTTrainer
from exgrpo_megatron.stop import StopSignal

if TYPE_CHECKING:
    from exgrpo_megatron.policy.actor import MegatronActor
    from exgrpo_megatron.policy.export import ExportOptions


def warm_start(config: Config, inputs: Inputs, comm: Communicator, reporter: Reporter, stop: StopSignal) -> Path | None:
    """The folder of the kept warm start, trained now if it is not there; None where a signal stopped it."""
    folder = warm_starts.warm_start_dir(config, inputs)
    if (folder / "config.json").is_file():
        reporter.note(f"warm start: reusing {folder}")
        return folder
    reporter.note(f"warm start: {config.sft.max_num_steps} supervised steps, kept in {folder}")
    return supervised_run(config, inputs, folder, comm, reporter, stop)


def supervised_run(
    config: Config, inputs: Inputs, export_to: Path, comm: Communicator, reporter: Reporter, stop: StopSignal
) -> Path | None:
    """Supervised fine-tuning, exported to `export_to`; None where a signal stopped it before the end.

    One that is stopped leaves a checkpoint in the run's folder, from which the next goes on if its steps are the same.
    """
    from exgrpo_megatron.policy.export import export_hf  # noqa: PLC0415

    with comm.places.inside(LOADING):
        trainer, actor = build.build_sft(config, inputs, comm)
        halfway = _Halfway(config, inputs, comm, trainer, actor)
        halfway.resume(reporter)
    log_dir = Path(config.logger.log_dir) / "sft"
    with open_metrics(config, comm, trainer.last_step, log_dir) as metrics:

        def after_step(step: int, values: dict[str, float]) -> bool:
            metrics.write(step, values)
            reporter.advance(f"loss {values['sft/loss']:.3f}")
            return not comm.anywhere(stop.requested)

        trainer.fit(after_step)
    for line in metrics.lost():
        reporter.note(line)
    if trainer.last_step < trainer.max_num_steps:
        halfway.save(reporter)
        return None
    _check_finite(trainer, actor)
    trained = TrainedModel(config, None, inputs.data_record() if comm.is_main else {}, inputs.train.fingerprint)
    with comm.places.inside("export"):
        export_hf(actor, export_to, inputs.model_dir, what_goes_along(inputs, trained))
    halfway.remove()
    return export_to


def what_goes_along(inputs: Inputs, trained: TrainedModel) -> ExportOptions:
    """Tokenizer and model card of an export."""
    from exgrpo_megatron.policy.export import ExportOptions  # noqa: PLC0415

    return ExportOptions(
        tokenizer_dir=inputs.tokenizer.folder, card=lambda report: model_card(trained, report.describe())
    )


class _Halfway:
    """The checkpoint of supervised steps that a signal stopped. Every method is collective over all processes."""

    def __init__(
        self, config: Config, inputs: Inputs, comm: Communicator, trainer: SFTTrainer, actor: MegatronActor
    ) -> None:
        self._enabled, self._comm = config.checkpointing.enabled, comm
        self._trainer, self._actor = trainer, actor
        self._steps = warm_starts.warm_start_dir(config, inputs).name
        """A name of all that the steps depend on."""
        keep = CheckpointConfig(keep_last_n=1, async_save=False)
        folder = Path(config.logger.log_dir) / "sft" / "checkpoints"
        self._store = CheckpointStore(folder, keep, comm, state_keys=_STATE_KEYS)

    def save(self, reporter: Reporter) -> None:
        step = self._trainer.last_step
        if not self._enabled:
            reporter.note(f"supervised step {step} is not saved (checkpointing.enabled = false)")
            return
        state = {"step": step, "supervised_steps": self._steps, "metrics": {}}
        path = self._store.save(step, state, lambda folder: [self._actor.begin_save(folder / "policy", snapshot=False)])
        reporter.note(f"stopped after supervised step {step} of {self._trainer.max_num_steps}, saved in {path}")

    def resume(self, reporter: Reporter) -> None:
        checkpoint = self._store.latest() if self._enabled else None
        if checkpoint is None:
            return
        state = read_state(checkpoint, _STATE_KEYS)
        if state["supervised_steps"] != self._steps:
            reporter.note(f"{checkpoint} is of other supervised steps than the recipe's, which begin anew")
            return
        self._store.verify(checkpoint)
        self._actor.load(checkpoint / "policy")
        self._trainer.last_step = state["step"]
        reporter.note(f"going on from {checkpoint}: {state['step']} of {self._trainer.max_num_steps} steps are done")
        reporter.skip(state["step"])

    def remove(self) -> None:
        if self._comm.is_main:
            shutil.rmtree(self._store.folder, ignore_errors=True)


_STATE_KEYS = frozenset({"step", "supervised_steps", "metrics"})


def _check_finite(trainer: SFTTrainer, actor: MegatronActor) -> None:
    """A model that answers nothing finite must not be kept, or every later run would begin with it."""
    scored = actor.score(trainer.batches.batch(0), temperature=1.0)
    if not all(np.isfinite(sequence.logprobs).all() and np.isfinite(sequence.entropies).all() for sequence in scored):
        raise UserError(
            "supervised fine-tuning has diverged: the model's log-probs are not finite, and nothing was kept; lower "
            "sft.optimizer.lr or lengthen sft.scheduler.lr_warmup_iters"
        )
