"""A run of two processes that stands still ends with an error that says on whom it waits, and where that one is."""

import os
import re
import signal
import socket
import sys
import time

import pytest
from test_cli_process import Running, free_port, train_args

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

LIMIT_S = 8


def start(args):
    """Two ranks without torchrun: the first of them has the store."""
    port = str(free_port())
    command = [sys.executable, "-m", "exgrpo_megatron", *map(str, args), f"cluster.hang_timeout_s={LIMIT_S}"]
    return [
        Running(
            command=command,
            more={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]  # fmt: skip


def error_of(ranks):
    """The one error, on one line."""
    lines = [line for one in ranks for line in one.lines if line.startswith("error: ")]
    assert len(lines) == 1, [one.output for one in ranks]
    assert f"nothing has moved for {LIMIT_S} s (cluster.hang_timeout_s): " in lines[0]
    assert "the same command goes on from the newest checkpoint" in lines[0]
    return lines[0]


def test_a_rank_that_is_stopped_in_a_step_is_named_by_the_one_that_waits(tmp_path, half_trained_model):
    ranks = start(train_args(half_trained_model, tmp_path / "run"))
    ranks[0].wait_for("step  2/12")
    stopped = ranks[1].process.pid
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert ranks[0].end() == 2
    assert time.monotonic() - began < 100
    ranks[1].process.kill()
    ranks[1].end()
    error = error_of(ranks[:1])
    assert f"rank 1 ({socket.gethostname()}, process {stopped}) does not answer any more; it was last seen in " in error
    assert re.search(r"; waiting for it: rank 0 in (after )?step \d", error)
    found = tmp_path / "run" / "hang"
    assert [line.split(" (")[0] for line in (found / "places.txt").read_text().splitlines()] == ["rank 0", "rank 1"]
    assert "exgrpo_megatron/trainer.py" in (found / "rank_00000.txt").read_text()
    assert not (found / "rank_00001.txt").exists()


def test_a_rank_that_hangs_in_a_file_is_named_by_itself_or_the_other_with_the_place_and_its_stack(
    tmp_path, half_trained_model
):
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / ".lock")  # to open it for writing waits for a reader, as a file system that is gone does
    ranks = start(train_args(half_trained_model, folder))
    assert [one.end() for one in ranks] == [2, 2]
    error = error_of(ranks)
    assert f"rank 0 ({socket.gethostname()}, process {ranks[0].process.pid}) is behind the others: in locking" in error
    assert "; waiting for it: rank 1 in locking the run's folder, gathering" in error
    assert " in locked\n" in (folder / "hang" / "rank_00000.txt").read_text()
    assert " in together\n" in (folder / "hang" / "rank_00001.txt").read_text()
