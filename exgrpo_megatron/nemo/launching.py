"""A task given to NeMo-Run: what would be submitted, submitted, or run on this machine to its end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import nemo_run as run
from invoke.exceptions import UnexpectedExit
from nemo_run.config import get_nemorun_home
from nemo_run.core.execution.base import Executor
from torchx.specs import AppState

from exgrpo_megatron.errors import UserError
from exgrpo_megatron.launch_command import training_python
from exgrpo_megatron.nemo.partials import resolve
from exgrpo_megatron.nemo.task import check_placeholder, machine_script


def script(task: run.Partial, stop_before_s: int = 600, *, stoppable: bool = False) -> run.Script:
    """The task as a script, for machines on which NeMo-Run is not installed; `run.run` and experiments take it too.

    Args:
        task: of `recipe` or `read_yaml`.
        stop_before_s: how long torchrun waits for its ranks to save, and a minute more.
        stoppable: for `run_here`.

    Raises:
        ConfigError: its recipe is none, nothing says which Python trains, or NeMo-Run would change the script.
    """
    python = training_python(task.python)
    text = machine_script(resolve(task), python, task.folder, stop_before_s, stoppable=stoppable)
    check_placeholder(text)
    return run.Script(inline=text)


def dry_run(task: run.Script, executor: Executor, name: str) -> str:
    """Every file of what would be submitted or run, the batch file first. Nothing of it is left."""
    # NeMo-Run's folder, that of its experiments, and that of the experiments of this name.
    above = [Path(get_nemorun_home()), *(Path(get_nemorun_home()) / "experiments" / part for part in ("", name))]
    made = [path for path in above if not path.exists()]
    with _experiment(task, executor, name) as experiment:
        experiment.dryrun(log=False, delete_exp_dir=False)
        folder = Path(experiment.jobs[0].executor.job_dir)
        files = [*sorted(folder.parent.glob("*_sbatch.sh")), *sorted(folder.glob("scripts/*.sh"))]
        text = "\n".join(f"# ---- {file}\n{file.read_text(encoding='utf-8')}" for file in files)
        shutil.rmtree(folder.parent)
    for path in reversed(made):
        with suppress(OSError):  # another launch may have put something there
            path.rmdir()
    return text


def submit(task: run.Script, executor: run.SlurmExecutor, name: str) -> str:
    """Hand the job to Slurm and return at once; says its number and how to follow it.

    Raises:
        UserError: Slurm did not take it.
    """
    with _experiment(task, executor, name) as experiment:
        try:
            experiment.run(detach=True)
        except UnexpectedExit as error:
            raise UserError(f"sbatch failed: {(error.result.stderr or error.result.stdout).strip()}") from error
        job, identity = experiment.jobs[0], experiment._id
    number = job.handle.partition("://")[2].split("/")[1]
    return f"submitted as job {number}; to follow it: nemo experiment logs {identity} 0"


def run_here(task: run.Script, executor: run.LocalExecutor, name: str) -> None:
    """Train on this machine, its output shown, to the end. SIGTERM and Ctrl-C are passed on: all ranks save and stop.

    Args:
        task: of `script(..., stoppable=True)`.
        executor: of `local_executor`.
        name: of the experiment.

    Raises:
        UserError: it ended with an error, or by a signal.
    """
    with _signals_passed_on() as process_ids, _experiment(task, executor, name) as experiment:
        job = experiment.jobs[0]
        process_id = Path(job.executor.job_dir) / "scripts" / f"{name}.sh.pid"
        process_ids.append(process_id)
        experiment.run(tail_logs=True)  # and leaving the experiment waits for it
    if job.state != AppState.SUCCEEDED:
        how = "was stopped by a signal" if _stop_asked(process_id).exists() else f"ended with {job.state.name}"
        raise UserError(
            f"the run {how}: its messages are above, and in {job.executor.job_dir}; the same command goes on from its "
            "newest checkpoint"
        )


@contextmanager
def _experiment(task: run.Script, executor: Executor, name: str) -> Iterator[run.Experiment]:
    """An experiment of one job, which says nothing of itself."""
    with run.Experiment(
        name,
        executor=executor,
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        experiment.add(task, name=name)
        yield experiment


@contextmanager
def _signals_passed_on() -> Iterator[list[Path]]:
    """To torchrun, which NeMo-Run starts in a session of its own and would kill after ten seconds; the list takes the
    file with its process id."""
    process_ids: list[Path] = []

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        if not process_ids or not process_ids[0].parent.exists():  # the script is not even written
            raise KeyboardInterrupt
        _stop_asked(process_ids[0]).touch()  # where it has not begun
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int(process_ids[0].read_text()), signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process_ids
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_asked(process_id: Path) -> Path:
    return process_id.with_name(f"{process_id.name}.stop")
