"""The runs of a sweep as processes of the same command, so many at a time, until they end or a signal comes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exgrpo_megatron.config import Config
from exgrpo_megatron.run_folder import METRICS_FILE
from exgrpo_megatron.stop import StopSignal
from exgrpo_megatron.sweep.arms import Run
from exgrpo_megatron.warm_starts import warm_start_identity

_POLL_S = 0.1
_TAIL_BYTES = 8192
_PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when its parent is gone."""


@dataclass(frozen=True)
class Ended:
    """How the process of a run ended."""

    exit_code: int
    """Below 0: by that signal."""
    seconds: float


def run_all(
    runs: Sequence[Run],
    jobs: int,
    devices: Sequence[str],
    stop: StopSignal,
    command: Callable[[Run], list[str]],
    *,
    began: Callable[[Run], None],
    ended: Callable[[Run, Ended], None],
    held: Sequence[int] = (),
) -> None:
    """Start the `command` of each, at most `jobs` at a time, and tell when it begins and ends.

    `devices`: one of them is all that the process in a slot sees of CUDA's; none: they see what there is. `held`: file
    descriptors that each process keeps open, such as a lock's. After the first signal nothing more begins, and what
    goes on is told to save and stop; on Linux also when this process is killed. Whatever leaves this function, no
    process is left behind.
    """
    pool, waiting, told = _Pool(jobs, devices, held), list(runs), False
    try:
        while waiting or pool.going:
            for run, how in pool.take_ended():
                ended(run, how)
            if stop.requested and not told:
                waiting, told = [], True
                pool.tell_to_stop()
            following = pool.choose(waiting)
            if following is None:
                time.sleep(_POLL_S)
                continue
            waiting.remove(following)
            began(following)
            pool.start(following, command(following))
    finally:
        pool.kill()


def train_command(run: Run) -> list[str]:
    """The run by this very program."""
    return [sys.executable, "-m", "exgrpo_megatron", "train", str(run.arm.recipe), *run.overrides]


def last_words(log: Path) -> str:
    """What a failed process said last: its message, or else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode("utf-8", errors="replace").splitlines()]
    except OSError:
        return ""
    lines = [line for line in lines if line]
    messages = [line for line in lines if line.startswith("error:")]
    return (messages or lines or [""])[-1]


@dataclass
class _Going:
    run: Run
    process: subprocess.Popen[bytes]
    slot: int
    started: float = field(default_factory=time.monotonic)


class _Pool:
    """The processes that go on, each in one of so many slots."""

    def __init__(self, jobs: int, devices: Sequence[str], held: Sequence[int]) -> None:
        self._jobs, self._devices, self._held = jobs, devices, held
        self.going: list[_Going] = []
        self._warm: set[str] = set()
        """Warm starts that are there for certain."""

    def choose(self, waiting: Sequence[Run]) -> Run | None:
        """The first of the runs that may begin now.

        Two processes must not make one warm start: while one may be about it, another that would begins later.
        """
        if len(self.going) == self._jobs:
            return None
        self._warm |= {_warm_start_of(one.run.config) for one in self.going if _is_past_warm_start(one.run)}
        busy = {_warm_start_of(one.run.config) for one in self.going if _may_be_making_warm_start(one.run)}
        return next((run for run in waiting if self._is_free(run.config, busy)), None)

    def start(self, run: Run, command: list[str]) -> None:
        slot = min(set(range(self._jobs)) - {one.slot for one in self.going})
        environment = dict(os.environ)
        # Several processes with a thread pool each only fight over the cores; a user's own setting stands.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self._jobs)))
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[slot % len(self._devices)]
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("ab") as log:
            # In a session of its own a terminal's Ctrl-C does not reach it: it is told once, by the sweep.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=self._held,
                preexec_fn=_stopped_with_parent(),
            )
        self.going.append(_Going(run, process, slot))

    def take_ended(self) -> list[tuple[Run, Ended]]:
        """Those that have ended since the last call."""
        done = [one for one in self.going if one.process.poll() is not None]
        self.going = [one for one in self.going if one not in done]
        return [(one.run, Ended(one.process.returncode, time.monotonic() - one.started)) for one in done]

    def tell_to_stop(self) -> None:
        for one in self.going:
            one.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Each process that goes on, and those that it started."""
        for one in self.going:
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()

    def _is_free(self, config: Config, busy: set[str]) -> bool:
        needed = _warm_start_of(config)
        return not config.sft.warm_start or needed in self._warm or needed not in busy


def _stopped_with_parent() -> Callable[[], None] | None:
    """For a child before it becomes the run: SIGTERM, by which a run saves and stops, once this process is gone."""
    if not sys.platform.startswith("linux"):
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # gone before it was asked
            os._exit(128 + signal.SIGTERM)

    return ask


def _may_be_making_warm_start(run: Run) -> bool:
    return run.config.sft.warm_start and not _is_past_warm_start(run)


def _is_past_warm_start(run: Run) -> bool:
    """Metrics of the run itself are there from its first step on."""
    return (run.folder / METRICS_FILE).is_file()


def _warm_start_of(config: Config) -> str:
    """The same where the warm start is."""
    identity = {**warm_start_identity(config), "model": config.policy.model_name}
    return json.dumps([config.sft.warm_start_dir, identity], sort_keys=True)
