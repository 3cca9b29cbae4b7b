"""Run a Python file in several processes, as torchrun would, with a time limit and readable failures.

Every rank is a process of its own, forked from one that has imported torch and Megatron-Core and done nothing else: the
imports, most of what a short test computes, are paid once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = ["exgrpo_megatron.policy.actor", "exgrpo_megatron.policy.checkpoint", "exgrpo_megatron.build"]


def launch(script: Path, num_processes: int, args: Sequence[str] = (), timeout_s: float = 120.0) -> list[str]:
    """Run `script args...` in `num_processes` ranks; returns what each rank wrote, in rank order.

    Raises:
        AssertionError: a rank failed, or the ranks were not done in time (all are killed then); the message ends with
            the last lines of every rank, the first failed one first.
    """
    _start_server()
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(num_processes)]
        ranks = [_start(script, args, rank, num_processes, port, file) for rank, file in enumerate(files)]
        failed = _wait(ranks, time.monotonic() + timeout_s)
        for process in ranks:
            process.kill()
            process.join()
        outputs = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    if failed is not None:
        order = sorted(range(num_processes), key=lambda rank: rank != failed)
        tails = "\n".join(
            f"--- rank {rank}, exit code {ranks[rank].exitcode}\n{outputs[rank][-4000:]}" for rank in order
        )
        raise AssertionError(f"{script.name} on {num_processes} ranks failed or took over {timeout_s} s\n{tails}")
    return outputs


def python_path() -> str:
    """PYTHONPATH by which a process finds this checkout's packages first."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "conversion"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _start_server() -> None:
    """The process that ranks are forked from, unless it runs; it lives as long as this one."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    # It imports what PYTHONPATH finds, and torch reads the number of threads as it is imported.
    with _environment(os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()


def _start(script: Path, args: Sequence[str], rank: int, world: int, port: int, output: Path) -> ForkServerProcess:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(str(script), list(args), environment, str(output)))
    process.start()
    return process


def _run(script: str, args: list[str], environment: dict[str, str], output: str) -> None:
    """In the rank's process: `script` as `python script args...` with its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(ranks: list[ForkServerProcess], deadline: float) -> int | None:
    """The first rank seen to fail (or still running at the deadline), or None when all ended well."""
    while True:
        codes = [process.exitcode for process in ranks]
        for rank, code in enumerate(codes):
            if code not in (None, 0):
                return rank
        if None not in codes:
            return None
        if time.monotonic() > deadline:
            return codes.index(None)
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
