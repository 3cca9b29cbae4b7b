"""Training from Python: what `exgrpo train` does, with what came of it as a value."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.process import launched_processes, launched_rank, whole_run
from exgrpo_megatron.stop import StoppedAtOnceError

if TYPE_CHECKING:
    from exgrpo_megatron.comm import Communicator
    from exgrpo_megatron.session import RunOutcome


@dataclass(frozen=True)
class TrainingResult:
    """What came of `train`; the same on every process, but for `rank`."""

    log_dir: Path
    """Folder of the run: recipe, metrics, checkpoints, dashboard (docs/commands.md)."""
    first_step: int
    """The step it began or went on after; equal to `last_step` where nothing was left to train."""
    last_step: int
    """Steps that are done, of `grpo.max_num_steps`."""
    finished: bool
    """False where a signal stopped it before the last step; `train` of the same recipe goes on from there."""
    checkpoint: Path | None
    """The newest checkpoint; None where none was written (`checkpointing.enabled`)."""
    export: Path | None
    """The Hugging Face folder; None before the last step, and with `checkpointing.export_hf: false`."""
    metrics: dict[str, float]
    """Those of the last step, by their names (docs/metrics.md); empty before the first one."""
    rank: int
    """Of this process; 0 alone should print."""


def train(config: Config) -> TrainingResult:
    """Train a recipe as `exgrpo train` does: warm start, steps, evaluation, checkpoints, export; go on where the run in
    `logger.log_dir` stopped. SIGTERM and Ctrl-C end it after the step, saved; a second one at once, by
    `KeyboardInterrupt`.

    Under torchrun every process calls it, once: it makes the process groups, and leaves them at its end. It prints what
    the command prints.

    Args:
        config: what `load_recipe` gives.

    Raises:
        UserError: something that must be changed, as its subclass: `ConfigError`, `DataError` (questions),
            `CheckpointError` (also a resume with other questions), `LostRankError` (another process is gone). Also a
            call from another thread than the main one, which gets the signals, while the script itself is being
            imported, or for the second time under torchrun.
    """
    _check_caller()
    with _own_sigterm(), whole_run(config) as (comm, stop):
        from exgrpo_megatron.train_command import train_and_report  # noqa: PLC0415

        outcome = train_and_report(config, comm, stop)
        return _result(outcome, config, comm)


def _result(outcome: RunOutcome | None, config: Config, comm: Communicator) -> TrainingResult:
    from exgrpo_megatron.metric_sinks import read_metrics  # noqa: PLC0415
    from exgrpo_megatron.run_folder import METRICS_FILE  # noqa: PLC0415

    log_dir = Path(config.logger.log_dir)
    if outcome is None:
        return TrainingResult(log_dir, 0, 0, False, None, None, {}, launched_rank())
    records = read_metrics(log_dir / METRICS_FILE) if comm.is_main and outcome.last_step else []
    last = {name: float(value) for name, value in records[-1].items() if name != "step"} if records else {}
    return TrainingResult(
        log_dir=log_dir,
        first_step=outcome.first_step,
        last_step=outcome.last_step,
        finished=outcome.finished,
        checkpoint=outcome.checkpoint,
        export=outcome.export,
        metrics=comm.broadcast(last),
        rank=launched_rank(),
    )


def _check_caller() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UserError("train() must be called by the main thread, which answers SIGTERM and Ctrl-C; or run `exgrpo`")
    # An actor is built by a run alone, and only then is its module imported.
    if launched_processes() > 1 and "exgrpo_megatron.policy.actor" in sys.modules:
        raise UserError(
            "train() was called in this process before, and processes that a launcher started find each other only "
            "once: start torchrun again for another run"
        )
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        if frame.f_code.co_name == "<module>" and outer.f_code.co_filename.startswith("<frozen importlib"):
            raise UserError(
                f"{frame.f_code.co_filename}, line {frame.f_lineno}: train() is called while this file is being "
                "imported, as other processes do for its functions: put the call under `if __name__ == '__main__':`"
            )
        frame = outer


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """The caller's way with SIGTERM is there again afterwards, and a second signal is what Python makes of Ctrl-C."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except StoppedAtOnceError:
        raise KeyboardInterrupt("stopped at once: nothing is saved of the steps since the last checkpoint") from None
    finally:
        signal.signal(signal.SIGTERM, before)
