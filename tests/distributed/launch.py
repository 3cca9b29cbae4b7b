"""Run a Python file in several processes, as torchrun would, with a time limit and readable failures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(script: Path, num_processes: int, args: Sequence[str] = (), timeout_s: float = 120.0) -> list[str]:
    """Run `script args...` in `num_processes` ranks; returns what each rank wrote, in rank order.

    Raises:
        AssertionError: a rank failed, or the ranks were not done in time (all are killed then); the message ends with
            the last lines of every rank, the first failed one first.
    """
    port = _free_port()
    ranks = [_start(script, args, rank, num_processes, port) for rank in range(num_processes)]
    failed = _wait(ranks, time.monotonic() + timeout_s)
    for process in ranks:
        process.kill()
    outputs = [process.communicate()[0] for process in ranks]
    if failed is not None:
        order = sorted(range(num_processes), key=lambda rank: rank != failed)
        codes = [process.returncode for process in ranks]
        tails = "\n".join(f"--- rank {rank}, exit code {codes[rank]}\n{outputs[rank][-4000:]}" for rank in order)
        raise AssertionError(f"{script.name} on {num_processes} ranks failed or took over {timeout_s} s\n{tails}")
    return outputs


def python_path() -> str:
    """PYTHONPATH by which a process finds this checkout's packages first."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "conversion"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _start(script: Path, args: Sequence[str], rank: int, world: int, port: int) -> subprocess.Popen[str]:
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
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _wait(ranks: list[subprocess.Popen[str]], deadline: float) -> int | None:
    """The first rank seen to fail (or still running at the deadline), or None when all ended well."""
    while True:
        codes = [process.poll() for process in ranks]
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
