"""The program of one worker with a reward function of the user's: JSON lines on standard input and output.

    python function_worker.py TIMEOUT_S MEMORY_BYTES NAME

NAME is `package.module:function` or `path/of/file.py:function`.

Says `"ready"` once the function is imported; then answers each line `[response, answer, question]` by the reward, or by
an object whose `error` says why there is none. Ends at the end of its input. Like `worker.py` it imports nothing of
this package, so that a worker holds no more than what the function needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
    try:
        function = load_function(name)
    except ImportError as error:
        raise SystemExit(str(error)) from None
    if wrong := _not_called_at_once(function):
        raise SystemExit(f"{name} is {wrong}: a call must return the reward itself, by an ordinary `def`")
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


def load_function(name: str) -> Callable[..., Any]:
    """The function of `package.module:function` or `path/of/file.py:function`; modules are looked for in the current
    folder too, and those that a file imports also beside it.

    Raises:
        ImportError: there is none, or the module cannot be imported; one line says why.
    """
    place, _, function_name = name.rpartition(":")
    _look_in(os.getcwd())
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ImportError(f"cannot import {place}: {described(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or "part of Python"
        raise ImportError(f"{place} ({where}) has no function {function_name!r}")
    return function


def _not_called_at_once(function: Callable[..., Any]) -> str | None:
    """What kind of function it is, if a call of it only makes something that would have to be run."""
    if inspect.iscoroutinefunction(function):
        return "an `async def`"
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    return "a generator (it has a `yield`)" if generates else None


def _module_of_file(path: Path) -> ModuleType:
    """The file as a module: of its package if it is in one, for what it imports relatively; else of a name of its own,
    for a script runs as `__main__`, and is imported beside that."""
    path = path.resolve()
    if (package_name := _name_in_package(path)) is not None:
        return importlib.import_module(package_name)
    name = f"{path.stem} ({path})"
    if name in sys.modules:
        return sys.modules[name]
    _look_in(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the module of a class
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_in_package(path: Path) -> str | None:
    """`package.module` of a file, by which it can be imported from here on; None where its folder has no `__init__.py`,
    or where that name is something else's here."""
    folder, names = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if folder == path.parent or not all(name.isidentifier() for name in names):
        return None
    _look_in(str(folder))
    spec = importlib.util.find_spec(names[0])
    found = spec.submodule_search_locations if spec else None
    return ".".join(names) if found and str(folder / names[0]) in map(os.path.realpath, found) else None


def _look_in(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


def reward_of(function: Callable[..., Any], response: str, answer: str, question: str) -> float | dict[str, str]:
    """The reward as a finite number, or the error."""
    try:
        number = float(function(question=question, response=response, answer=answer))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the answer has no reward, the run goes on and counts it
        return {"error": described(error)}
    return number if math.isfinite(number) else {"error": f"the reward is {number}, not a finite number"}


def described(error: BaseException) -> str:
    """Kind and message of an error, cut off where it is long."""
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
