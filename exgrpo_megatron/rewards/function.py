"""Rewards by a function of the user's, run in worker processes that can be killed (`env.reward_function`)."""

from __future__ import annotations

import hashlib
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from exgrpo_megatron.config import EnvConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.rewards.pool import Outcome, WorkerPool, WorkerProgram
from exgrpo_megatron.rewards.verifier import Graded, Verdict

START_LIMIT_S = 120.0
"""Time to import the function's module."""


class FunctionVerifier:
    """Grades by `function(question=, response=, answer=) -> float`; an answer whose reward is above `env.correct_above`
    counts as correct.

    The processes start here and end with `close`. What the function raises, and what is no finite number, is the status
    `error` with reward 0. Equal answers to one question are graded once, as long as `env.math.cache_size` remembers.
    """

    def __init__(self, config: EnvConfig, on_progress: Callable[[], None] = lambda: None) -> None:
        """`on_progress` is called for every answer that a worker graded."""
        assert config.reward_function is not None
        self._threshold, self._cache_size = config.correct_above, config.math.cache_size
        self._pool = WorkerPool(
            config.math.num_workers,
            config.math.timeout_s,
            _program(config.reward_function),
            _memory_bytes(config),
            on_progress,
        )
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._lock = Lock()

    def grade(self, items: Sequence[Graded]) -> list[Verdict]:
        """The verdict on each (response text, gold answer, question text), in order.

        Raises:
            ValueError: an item is without its question.
            UserError: the workers do not start.
        """
        names = [_name(item) for item in items]
        with self._lock:
            outcomes = self._outcomes(dict(zip(names, items, strict=True)))
        return [self._verdict(outcomes[name]) for name in names]

    def check_gold(self, answers: Sequence[str]) -> list[int]:  # noqa: ARG002  as other verifiers
        """None: only the function knows what a response that deserves a reward looks like."""
        return []

    def close(self) -> None:
        """End every worker process. May be called twice."""
        with self._lock:
            self._pool.close()

    def _outcomes(self, items: dict[bytes, Graded]) -> dict[bytes, Outcome]:
        known: dict[bytes, Outcome] = {name: self._cache[name] for name in items if name in self._cache}
        unknown = [name for name in items if name not in known]
        known.update(zip(unknown, self._pool.run([items[name] for name in unknown]), strict=True))
        for name, outcome in known.items():
            # A time-out or an error may be the machine's fault, and is never remembered.
            if not isinstance(outcome, str):
                self._cache[name] = outcome
                self._cache.move_to_end(name)
                if len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        return known

    def _verdict(self, outcome: Outcome) -> Verdict:
        if isinstance(outcome, str):
            return Verdict(0.0, outcome)
        return Verdict(outcome, "correct" if outcome > self._threshold else "wrong")


def check_reward_function(config: EnvConfig) -> None:
    """Raise ConfigError where `env.reward_function` cannot be imported in a worker process."""
    name = config.reward_function
    if name is None:
        return
    command = _program(name).command(config.math.timeout_s, _memory_bytes(config))
    try:
        ended = subprocess.run(command, input=b"", capture_output=True, timeout=START_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"env.reward_function = {name!r}: not imported within {START_LIMIT_S:.0f} s") from None
    if ended.returncode or b'"ready"' not in ended.stdout:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ConfigError(
            f"env.reward_function = {name!r}: {lines[-1]} (modules are looked for among the installed packages, in "
            f"PYTHONPATH and in {Path.cwd()}, files from there; memory: env.worker_memory_mib = "
            f"{config.worker_memory_mib})"
        )


def _program(name: str) -> WorkerProgram:
    return WorkerProgram(
        Path(__file__).with_name("function_worker.py"), (name,), f"They run env.reward_function = {name!r}"
    )


def _memory_bytes(config: EnvConfig) -> int:
    return config.worker_memory_mib << 20


def _name(item: Graded) -> bytes:
    """What equal items have in common, in 16 bytes: responses are long."""
    if len(item) != 3:
        raise ValueError("a reward function is asked for an answer without its question")
    digest = hashlib.blake2b(digest_size=16)
    for part in item:
        text = part.encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
