r"""The program of one reward worker: Math-Verify over JSON lines on standard input and output.

    python worker.py TIMEOUT_S MEMORY_BYTES

Says `"ready"` once it has graded a known pair; then answers each line `[answer, gold]` with `true` or `false`, in
order. Ends at the end of its input. It must stay a program of its own that imports nothing of this package: a
worker starts in about half a second and holds 60 MB because it never loads torch.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

ORPHAN_GRACE_S = 2.0
"""The parent kills at the limit. This much later the kernel does, should the parent be gone or blocked."""


def is_correct(answer: str, gold: str) -> bool:
    """Whether Math-Verify takes the answer in the text `answer` for that in `gold`; without a limit of time."""
    return bool(verify(_parsed_gold(gold), parse(answer, parsing_timeout=None), timeout_seconds=None))


def main() -> None:
    timeout_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    send = _private_output()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which still has a step to finish
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process, whatever Python is doing
    logging.disable(logging.CRITICAL)  # Math-Verify warns that its own time limits are off
    _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    if not is_correct(r"\boxed{\frac{1}{2}}", r"\boxed{0.5}") or is_correct(r"\boxed{2}", r"\boxed{0.5}"):
        raise SystemExit("Math-Verify misjudges 1/2 = 0.5: math-verify and latex2sympy2_extended do not fit together")
    send("ready")
    for line in sys.stdin.buffer:
        answer, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
        correct = is_correct(answer, gold)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(correct)
        if _address_space_bytes() > memory_bytes // 2:
            # The parser's tables only grow. At the limit Math-Verify would swallow every MemoryError and call all
            # answers wrong; a fresh worker takes over long before.
            send("full")
            os._exit(0)


@lru_cache(maxsize=1024)
def _parsed_gold(gold: str) -> list[Any]:
    return parse(gold, parsing_timeout=None)


def _private_output() -> Any:
    """A sender on what was standard output; prints of the libraries go to standard error from here on."""
    channel = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: str | bool) -> None:
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
