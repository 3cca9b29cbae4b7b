"""Worker processes that grade one answer at a time and are killed when an answer takes too long.

The workers are plain `python PROGRAM` children on pipes, not `multiprocessing`: a spawned process there imports
the parent's main module again (hence torch, in every worker), and leaves a resource-tracker process behind. Nothing
of the parent but its environment reaches a worker, and nothing here uses threads or signals, so a pool may live in
any thread. Results come back one by one and in order, hence a killed worker costs only the answer it was at.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exgrpo_megatron.errors import UserError

Outcome = float | Literal["timeout", "error"]
"""The reward of an answer, or why there is none."""

MEMORY_LIMIT_BYTES = 1 << 30
"""Address space of one worker; a fresh one of Math-Verify has 80 MB."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerProgram:
    """What the workers of a pool run: `path` TIMEOUT_S MEMORY_BYTES and `arguments`.

    It says `"ready"`, then answers each JSON line of its input by one line: a number (or true, false), or an object
    whose `error` says why there is none. `"full"` says that it ends now because it has grown too large, and that the
    requests it has not answered are for another.
    """

    path: Path
    arguments: tuple[str, ...]
    advice: str
    """What to look at where it does not start."""

    def command(self, timeout_s: float, memory_bytes: int) -> list[str]:
        # -P: the folder of the program is not a place to import from.
        start = [sys.executable, "-P", "-W", "ignore", str(self.path), repr(timeout_s), str(memory_bytes)]
        return [*start, *self.arguments]


MATH_VERIFY = WorkerProgram(
    Path(__file__).with_name("worker.py"), (), f"Check the installation with: {sys.executable} -c 'import math_verify'"
)


class WorkerPool:
    """`num_workers` worker processes, started at once and replaced when they die. Not for two threads at a time."""

    def __init__(
        self,
        num_workers: int,
        timeout_s: float,
        program: WorkerProgram = MATH_VERIFY,
        memory_bytes: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_progress` is called for every answer that has its outcome."""
        self._program, self._timeout_s, self._on_progress = program, timeout_s, on_progress
        self._command = program.command(timeout_s, memory_bytes or MEMORY_LIMIT_BYTES)
        self._told: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        for _ in range(num_workers):
            self._start()

    def run(self, requests: Sequence[tuple[str, ...]]) -> list[Outcome]:
        """The outcome of each request, such as (answer text, gold answer).

        `timeout`: the answer took longer than `timeout_s`. `error`: the program has no reward for it (logged), or two
        workers in a row died over it (one death may come from outside, so the answer gets a second try). Raises
        UserError where workers do not start.
        """
        if not self._workers:
            raise RuntimeError("the worker pool is closed")
        batch = _Batch(requests, self._on_progress)
        try:
            while batch.num_open:
                for worker in self._workers:
                    worker.feed(batch)
                self._collect(batch)
        finally:
            for worker in [worker for worker in self._workers if worker.in_flight]:
                self._replace(worker)  # interrupted: its late results must not be read as those of the next batch
        self._tell(batch.errors)
        return [outcome for outcome in batch.outcomes if outcome is not None]

    def close(self) -> None:
        """Kill and reap every worker. May be called twice."""
        while self._workers:
            self._stop(self._workers[0])
        self._selector.close()

    def _collect(self, batch: _Batch) -> None:
        """Wait for results, deaths or the next deadline, and act on them."""
        wait_s = min(worker.deadline for worker in self._workers) - time.monotonic()
        events = self._selector.select(None if math.isinf(wait_s) else max(0.0, wait_s))
        for event, _ in events:
            worker: _Worker = event.data
            if not worker.receive(batch):
                self._bury(worker, batch)
            elif worker.ready:
                self._failed_starts = 0
        # Results that are already in the pipe have been read: only a worker still at its answer is over time.
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            self._expire(worker, batch)

    def _expire(self, worker: _Worker, batch: _Batch) -> None:
        if worker.ready:
            batch.settle(worker.in_flight.popleft(), "timeout")
            batch.put_back(worker.in_flight)
        else:
            self._count_failed_start(worker, f"not ready after {_START_LIMIT_S:.0f} s")
        self._replace(worker)

    def _bury(self, worker: _Worker, batch: _Batch) -> None:
        """Replace a worker that has ended by itself, and decide what that means for the answer it was at."""
        code = worker.reap()
        if not worker.ready:
            self._count_failed_start(worker, f"exit code {code}")
        elif code == -signal.SIGALRM and worker.in_flight:  # its own alarm was quicker than the deadline here
            batch.settle(worker.in_flight.popleft(), "timeout")
        elif not worker.full and worker.in_flight:  # whatever the code: what it runs may have called exit(0)
            _logger.warning("a reward worker died (exit code %d) while grading: %s", code, worker.last_words())
            batch.blame(worker.in_flight[0])
        batch.put_back(worker.in_flight)
        self._replace(worker)

    def _count_failed_start(self, worker: _Worker, what: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise UserError(f"the reward workers do not start ({what}): {worker.last_words()}. {self._program.advice}")

    def _tell(self, errors: Sequence[str]) -> None:
        """Log what the program said of answers that it could not grade, each text once."""
        for text in dict.fromkeys(errors):
            if text not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(text)
                _logger.warning("an answer could not be graded and got 0: %s", text)

    def _replace(self, worker: _Worker) -> None:
        self._stop(worker)
        self._start()

    def _start(self) -> None:
        worker = _Worker(self._command, self._timeout_s)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _stop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.output)
        worker.kill()


class _Batch:
    """The requests of one run: which are waiting, and what came out."""

    def __init__(self, requests: Sequence[tuple[str, ...]], on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self.lines = [json.dumps(request).encode() + b"\n" for request in requests]
        self.outcomes: list[Outcome | None] = [None] * len(requests)
        self.waiting = deque(range(len(requests)))
        self.num_open = len(requests)
        self.errors: list[str] = []
        self._deaths: Counter[int] = Counter()

    def take(self, index: int, reply: float | dict[str, str]) -> None:
        """What a worker said of an answer."""
        if isinstance(reply, dict):
            self.errors.append(reply["error"])
            self.settle(index, "error")
        else:
            self.settle(index, float(reply))

    def settle(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.num_open -= 1
        self._on_progress()

    def put_back(self, indices: deque[int]) -> None:
        """Back to the head of the line, those that are settled left out."""
        self.waiting.extendleft(index for index in reversed(indices) if self.outcomes[index] is None)
        indices.clear()

    def blame(self, index: int) -> None:
        self._deaths[index] += 1
        if self._deaths[index] == _MAX_DEATHS:
            self.settle(index, "error")


class _Worker:
    """One worker process and the requests it has been sent."""

    def __init__(self, command: list[str], timeout_s: float) -> None:
        self.ready = False
        self.full = False
        """Whether it has said that it makes room for another."""
        self.in_flight: deque[int] = deque()
        self.deadline = time.monotonic() + _START_LIMIT_S
        """Monotonic time at which it is to be killed; infinite while it has nothing to do."""
        self._timeout_s = timeout_s
        self._unread = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill; a pipe nobody reads would block it
        # What follows a `truncate` begins at the new end.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # SymPy's orderings follow string hashes; a verdict must not depend on which worker gave it.
            env={**os.environ, "PYTHONHASHSEED": "0"},
            process_group=0,  # Ctrl-C in the terminal reaches the trainer only
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self.output = self._process.stdout

    def feed(self, batch: _Batch) -> None:
        """Keep a few requests in the pipe, so that the worker never waits for its next one."""
        while self.ready and batch.waiting and len(self.in_flight) < _MAX_IN_FLIGHT:
            line = batch.lines[batch.waiting[0]]
            # A write must never wait for a worker that is busy: only an idle one, who reads, gets a long line.
            if self.in_flight and sum(len(batch.lines[index]) for index in self.in_flight) + len(line) > _PIPE_BYTES:
                return
            if not self.in_flight:
                self.deadline = time.monotonic() + self._timeout_s
            self.in_flight.append(batch.waiting.popleft())
            with contextlib.suppress(BrokenPipeError):  # it has died; the end of its output says so too
                self._input.write(line)
                self._input.flush()

    def receive(self, batch: _Batch) -> bool:
        """Read what has come; False at the end of the worker's output."""
        data = os.read(self.output.fileno(), 1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            if reply == "ready":
                self.ready = True
            elif reply == "full":
                self.full = True
            else:
                batch.take(self.in_flight.popleft(), reply)
            self.deadline = time.monotonic() + self._timeout_s if self.in_flight else math.inf
        if os.fstat(self._stderr.fileno()).st_size > _STDERR_BYTES:  # what it runs may print with every answer
            self._stderr.truncate(0)
        return bool(data)

    def reap(self) -> int:
        """Exit code of a worker whose output has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_REAP_S)
        self._kill_group()
        return self._process.wait()

    def kill(self) -> None:
        self._kill_group()
        self._process.wait()
        self.output.close()
        with contextlib.suppress(BrokenPipeError):  # a request that never left the buffer
            self._input.close()
        self._stderr.close()

    def _kill_group(self) -> None:
        """The worker, and the processes that what it runs has started and not waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The end of what it wrote to standard error, on one line."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 2000))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


_START_LIMIT_S = 120.0
_MAX_FAILED_STARTS = 3
_MAX_DEATHS = 2
_MAX_TOLD = 10
_MAX_IN_FLIGHT = 4
_PIPE_BYTES = 1 << 15  # half of what a Linux pipe holds
_REAP_S = 5.0
_STDERR_BYTES = 1 << 20
