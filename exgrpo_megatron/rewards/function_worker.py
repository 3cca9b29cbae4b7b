"""The program of one worker with a reward function of the user's: JSON lines on standard input and output.

    python function_worker.py TIMEOUT_S MEMORY_BYTES PACKAGE.MODULE:FUNCTION

Says `"ready"` once the function is imported; then answers each line `[response, answer, question]` by the reward, or by
an object whose `error` says why there is none. Ends at the end of its input. Like `worker.py` it imports nothing of
this package, so that a worker holds no more than what the function needs.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

ORPHAN_GRACE_S = 2.0
"""The parent kills at the limit. This much later the kernel does, should the parent be gone or blocked."""
LONGEST_MESSAGE = 500
"""Characters of what an error says."""


def main() -> None:
    timeout_s, memory_bytes, name = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    send, requests = _private_output(), _private_input()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which still has a step to finish
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    function = load(name)
    if (needed := _address_space_bytes()) > memory_bytes // 2:
        raise SystemExit(
            f"{name} needs {needed >> 20} MiB of address space once it is imported: it must have twice as much"
        )
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, whatever Python is doing
    send("ready")
    for line in requests:
        response, answer, question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
        reply = reward_of(function, response, answer, question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(reply)
        if _address_space_bytes() > memory_bytes // 2:
            send("full")
            os._exit(0)  # what it has piled up goes with it, and a fresh one takes over


def load(name: str) -> Callable[..., Any]:
    """The function `package.module:function`; ends the program with one line where there is none."""
    module_name, _, function_name = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  anything may happen while a stranger's module is imported
        raise SystemExit(f"cannot import {module_name}: {_described(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or "part of Python"
        raise SystemExit(f"{module_name} ({where}) has no function {function_name!r}")
    return function


def reward_of(function: Callable[..., Any], response: str, answer: str, question: str) -> float | dict[str, str]:
    """The reward as a finite number, or the error."""
    try:
        number = float(function(question=question, response=response, answer=answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the answer has no reward, the run goes on and counts it
        return {"error": _described(error)}
    return number if math.isfinite(number) else {"error": f"the reward is {number}, not a finite number"}


def _described(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}..."


def _private_input() -> BinaryIO:
    """What was standard input; a function that reads it finds its end instead of the requests."""
    channel = os.dup(sys.stdin.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return os.fdopen(channel, "rb")


def _private_output() -> Callable[[Any], None]:
    """A sender on what was standard output; prints of the function go to standard error from here on."""
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: Any) -> None:
        os.write(channel, json.dumps(message).encode() + b"\n")

    return send


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
