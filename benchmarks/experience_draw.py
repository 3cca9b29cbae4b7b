"""Time to draw 64 questions from buffers of 5,000 to 1,000,000 stored questions.

    python benchmarks/experience_draw.py

Groups of 8 over all seven buckets (binomial counts at accuracy 0.5), with 64 questions excluded, as in a batch of 128
at a share of 0.5. The goal is under 5 ms at 30,000; what must not happen is a time that grows with the buffer.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.types import Group, Question, Trajectory

GROUP_SIZE = 8
NUM_DRAWN = 64
SIZES = (5_000, 10_000, 30_000, 100_000, 1_000_000)
REPEATS = 200


def main() -> None:
    print(f"{'stored questions':>16} {'median ms':>10} {'worst ms':>9}   ({REPEATS} draws of {NUM_DRAWN})")
    buffer = ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), GROUP_SIZE, SingleProcess())
    rng = np.random.default_rng(0)
    for size in SIZES:
        fill(buffer, size, rng)
        times_ms = [draw_ms(buffer, rng) for _ in range(REPEATS)]
        print(f"{size:>16,} {statistics.median(times_ms):>10.3f} {max(times_ms):>9.3f}")


def fill(buffer: ExperienceBuffer, size: int, rng: np.random.Generator) -> None:
    """Record one group a question until `size` questions are stored; they share their arrays' contents."""
    prompt, tokens = np.array([1], dtype=np.int32), np.array([2, 3], dtype=np.int32)
    logprobs = np.array([-0.5, -0.5], dtype=np.float32)
    for i in range(buffer.num_questions, size):
        correct = int(np.clip(rng.binomial(GROUP_SIZE, 0.5), 1, GROUP_SIZE - 1))
        members = [Trajectory(tokens, logprobs, float(j < correct), False, "stop", 0) for j in range(GROUP_SIZE)]
        buffer.record([Group(Question(f"question-{i}", prompt, ""), tuple(members))], step=0, collect=True)


def draw_ms(buffer: ExperienceBuffer, rng: np.random.Generator) -> float:
    exclude = {f"question-{i}" for i in rng.integers(0, buffer.num_questions, NUM_DRAWN)}
    start = time.perf_counter()
    drawn = buffer.draw(NUM_DRAWN, rng, exclude)
    elapsed = time.perf_counter() - start
    assert len(set(drawn) - exclude) == NUM_DRAWN
    return 1000 * elapsed


if __name__ == "__main__":
    main()
