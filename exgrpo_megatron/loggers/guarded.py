"""A tool of others beside the run: it works in a thread of its own, and what it fails at ends nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread

from exgrpo_megatron.addresses import without_credentials
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.loggers.protocol import Ended, RunLogger
from exgrpo_megatron.metric_sinks import AnswerRow

DRAIN_S = 60.0
"""How long a run waits at its end for what is still to be handed over."""

logger = logging.getLogger(__name__)


def in_a_line(error: Exception, secrets: Sequence[str]) -> str:
    """Kind and first line of an error of a tool, without credentials."""
    words = str(error).strip().partition("\n")[0]
    return without_credentials(f"{type(error).__name__}: {words}", secrets)


class Memory:
    """Which run of another tool a folder's run is, and the last step handed to it; in a small file of the folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.run_id: str | None = None
        self.last_step = -1

    def recall(self) -> None:
        """What an earlier process wrote; nothing where it wrote nothing that can be read."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.run_id, self.last_step = str(found["run_id"]), int(found["last_step"])
        except (OSError, ValueError, KeyError, TypeError):
            self.run_id, self.last_step = None, -1

    def keep(self, run_id: str, last_step: int) -> None:
        """Raises UserError where the disk refuses it."""
        self.run_id, self.last_step = run_id, last_step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._path, json.dumps({"run_id": run_id, "last_step": last_step}) + "\n")


class GuardedLogger:
    """Hands everything to a `RunLogger` in a thread, in order; training never waits for it.

    The histories of these tools only grow. So a step is noted as handed over before it is, and none is twice: what a
    run resumed from an older checkpoint does again is left out, and counted.
    """

    def __init__(self, title: str, run: RunLogger, memory: Memory, secrets: Sequence[str] = ()) -> None:
        """`secrets` are kept out of what is said of failures."""
        self.title, self.where, self.look = title, run.where, run.look
        self.num_failed = 0
        """Calls that failed."""
        self.num_undelivered = 0
        self.again: list[int] = []
        """Steps that were handed over before the run was resumed."""
        self._run, self._memory, self._secrets = run, memory, secrets
        self._first_failure = ""
        self._ended: Ended | None = None
        self._queue: Queue[Callable[[], None] | None] = Queue()
        self._thread = Thread(target=self._work, name=f"logger {title}", daemon=True)
        memory.keep(run.run_id, memory.last_step)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._queue.put(partial(self._write, step, dict(metrics)))

    def truncate_after(self, step: int) -> None:
        """Nothing can be taken back; see the class."""

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        self._queue.put(partial(self._answers, step, list(rows)))

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        self._ended = Ended.finished
        self._queue.put(partial(self._run.finish, dict(summary), list(files)))

    def close(self, *, failed: bool = False) -> None:
        """Wait up to `DRAIN_S` for what is left."""
        ended = Ended.failed if failed else self._ended or Ended.stopped
        self._queue.put(partial(self._run.close, ended))
        self._queue.put(None)
        self._thread.join(DRAIN_S)
        if self._thread.is_alive():
            self.num_undelivered = self._queue.qsize()  # the None that ends it stands for the call it hangs in

    def lost(self) -> list[str]:
        """What it did not get; complete once it is closed."""
        lines = []
        if self.num_failed:
            lines.append(f"{self.title}: {self.num_failed} calls failed, the first: {self._first_failure}")
        if self.num_undelivered:
            lines.append(f"{self.title}: {self.num_undelivered} calls were not handed over within {DRAIN_S:.0f} s")
        if self.again:
            lines.append(
                f"{self.title}: steps {self.again[0]} to {self.again[-1]} were logged before the run was resumed, and "
                "stand there as they were; metrics.jsonl has what they are now"
            )
        return lines

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # errors of tools of others have no base of their own
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        if self.num_failed == 1:
            self._first_failure = in_a_line(error, self._secrets)
            logger.warning("%s: %s; training goes on, further failures are counted", self.title, self._first_failure)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._memory.last_step:
            self.again.append(step)
            return
        self._memory.keep(self._run.run_id, step)
        self._run.metrics(step, metrics)

    def _answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        if step > self._memory.last_step:
            self._run.answers(step, rows)
