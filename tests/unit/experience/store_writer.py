"""A process whose children store answers until they are killed: `python store_writer.py`, without torch.

For each line `FOLDER CAP` of the input a child is forked that keeps CAP answers a question (0: any number) in FOLDER,
and its process id is written when it has begun.
"""

import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.experience.ids import IdTable
from exgrpo_megatron.experience.keeper import Keeper
from exgrpo_megatron.types import StoredAnswer

SEGMENT_BYTES = 16_384
"""Small, so that a process is also killed while it ends one segment and begins another, or compacts."""


def answer_number(serial: int) -> tuple[str, StoredAnswer]:
    """The answer with this serial, and its question: the same in every process."""
    rng = np.random.default_rng(serial)
    length = int(rng.integers(1, 300))
    logprobs = (-rng.exponential(1.0, length)).astype(np.float32)
    return f"q{serial % 40}", StoredAnswer(rng.integers(0, 50_000, length).astype(np.int32), logprobs, 3, serial // 8)


def main() -> None:
    assert "torch" not in sys.modules
    for line in sys.stdin:
        folder, cap = line.split()
        begun, begin = os.pipe()
        child = os.fork()
        if not child:
            store_forever(Path(folder), int(cap) or None, begin)
        os.read(begun, 1)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)


def store_forever(folder: Path, cap: int | None, begin: int) -> None:
    config = ExperienceConfig(bucket_weight="counts", max_answers_per_question=cap)
    keeper, ids = Keeper(config, folder, SEGMENT_BYTES), IdTable()
    os.write(begin, b".")
    serial = 0
    while True:
        for _ in range(8):
            name, answer = answer_number(serial)
            keeper.keep(ids.intern(name), name, [answer], serial)
            serial += 1
        keeper.tidy()


if __name__ == "__main__":
    main()
