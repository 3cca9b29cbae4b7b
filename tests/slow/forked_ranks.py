"""`python forked_ranks.py PORT ARGUMENTS...`: `exgrpo ARGUMENTS...` as two ranks, without torchrun.

They are forked from a process that has loaded everything, so that they begin at the same time however busy the machine
is. Says of each which process it is, and its exit code.
"""

import os
import sys

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

from exgrpo_megatron import build, session, supervised  # noqa: F401 (loaded before the fork)
from exgrpo_megatron.cli import main
from exgrpo_megatron.policy import actor, distributed  # noqa: F401


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(rank, port, arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    sys.argv = ["exgrpo", *arguments]
    main()


if __name__ == "__main__":
    port, *arguments = sys.argv[1:]
    ranks = {}
    for rank in range(2):
        process = os.fork()
        if process == 0:
            run(rank, port, arguments)
        ranks[process] = rank
        say(f"rank {rank} is process {process}")
    while ranks:
        process, status = os.wait()
        say(f"rank {ranks.pop(process)} ended: {os.waitstatus_to_exitcode(status)}")
