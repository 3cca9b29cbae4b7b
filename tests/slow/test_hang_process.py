"""A run of two processes that stands still ends with an error that says on whom it waits, and where that one is."""

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from cli_runs import Running, free_port, train_args

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

LIMIT_S = 8
LAUNCHER = Path(__file__).with_name("forked_ranks.py")


def start(args):
    command = [sys.executable, str(LAUNCHER), str(free_port()), *map(str, args), f"cluster.hang_timeout_s={LIMIT_S}"]
    return Running(command=command)


def process_of(running, rank):
    running.wait_for(f"rank {rank} is process")
    return int(re.search(rf"rank {rank} is process (\d+)", running.output)[1])


def error_of(running):
    """The one error, on one line."""
    lines = [line for line in running.lines if line.startswith("error: ")]
    assert len(lines) == 1, running.output
    assert f"nothing has moved for {LIMIT_S} s (cluster.hang_timeout_s): " in lines[0]
    assert "the same command goes on from the newest checkpoint" in lines[0]
    return lines[0]


def test_a_rank_that_is_stopped_in_a_step_is_named_by_the_one_that_waits(tmp_path, half_trained_model):
    running = start(train_args(half_trained_model, tmp_path / "run"))
    stopped = process_of(running, 1)
    running.wait_for("step  2/12")
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    running.wait_for("rank 0 ended: 2")
    assert time.monotonic() - began < 100
    os.kill(stopped, signal.SIGKILL)
    assert running.end() == 0
    error = error_of(running)
    assert f"rank 1 ({socket.gethostname()}, process {stopped}) does not answer any more; it was last seen in " in error
    assert re.search(r"; waiting for it: rank 0 in (after )?step \d", error)
    found = tmp_path / "run" / "hang"
    assert [line.split(" (")[0] for line in (found / "places.txt").read_text().splitlines()] == ["rank 0", "rank 1"]
    assert "exgrpo_megatron/trainer.py" in (found / "rank_00000.txt").read_text()
    assert not (found / "rank_00001.txt").exists()


def test_a_rank_that_hangs_in_a_file_is_named_with_the_place_and_its_stack(tmp_path, half_trained_model):
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / ".lock")  # to open it for writing waits for a reader, as a file system that is gone does
    running = start(train_args(half_trained_model, folder))
    assert running.end() == 0
    assert all(f"rank {rank} ended: 2\n" in running.lines for rank in range(2)), running.output
    error = error_of(running)
    behind = f"rank 0 ({socket.gethostname()}, process {process_of(running, 0)}) is behind the others: in locking"
    assert behind in error
    assert "; waiting for it: rank 1 in locking the run's folder, gathering" in error
    assert " in locked\n" in (folder / "hang" / "rank_00000.txt").read_text()
    assert " in together\n" in (folder / "hang" / "rank_00001.txt").read_text()
