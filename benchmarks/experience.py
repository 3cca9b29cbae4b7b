"""Speed, memory and disk of stored experience.

    python benchmarks/experience.py [--small] [--draws]

Draws of 64 questions from 10,000 to 1,000,000, in groups of 8 over all seven buckets, with 64 excluded, as in a batch
of 128 at a share of 0.5, by the bucket alone and with every other choice of questions (CPU time); reading what was
drawn;
recording 1000 answers of 700 tokens; taking and writing a checkpoint of 200,000 answers, opening it, and opening it as
each of 8 ranks; bytes in memory and on disk. Log-probs are exponential with mean 0.3 in 3 of 5 tokens and 0.0005 in the
others, ids Zipf over 150,000. `--small`: a tenth of it; `--draws`: the draws alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.difficulty import bucket_of, variance_rate
from exgrpo_megatron.types import Group, Question, Trajectory

GROUP_SIZE, NUM_DRAWN, TOKENS, RANKS, REPEATS = 8, 64, 700, 8, 50
PER_QUESTION = 4
PROMPT = np.array([1], dtype=np.int32)


def main() -> None:
    scale = 10 if "--small" in sys.argv else 1
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        draws([10_000 // scale, 100_000 // scale, 1_000_000 // scale], rng, Path(folder) / "draws")
        strategies(1_000_000 // scale, rng, Path(folder) / "strategies")
        if "--draws" not in sys.argv:
            answers(200_000 // scale, rng, Path(folder))


def draws(sizes: list[int], rng: np.random.Generator, folder: Path) -> None:
    print(f"{'questions':>10} {'draw ms':>8} {'worst':>6} {'index B/question':>17} {'growth while drawing MiB':>25}")
    for size in sizes:
        buffer = new_buffer(folder)
        correct = np.clip(rng.binomial(GROUP_SIZE, 0.5, size), 1, GROUP_SIZE - 1)
        # The index alone decides a draw: a million answers need not be written for it.
        buffer._state.index.fill([f"question-{i}" for i in range(size)], correct, np.ones(size, np.int64))
        before = memory()
        times = [draw_ms(buffer, rng) for _ in range(REPEATS)]
        print(
            f"{size:>10,} {statistics.median(times):>8.2f} {max(times):>6.1f} {buffer.index_nbytes / size:>17.1f} "
            f"{(memory() - before) / 2**20:>25.1f}"
        )


WINDOW = {"difficulty": "window", "difficulty_window": 64}
VARIANCE = {"difficulty": "reward_variance"}
MIDDLE = {"difficulty_range": (0.3, 0.7)}
QUANTILES = {**MIDDLE, "difficulty_range_unit": "quantile"}
CATEGORIES = {"difficulty_per_category": True}
STRATEGIES: dict[str, dict[str, Any]] = {
    "last group": {},
    "last group, range": MIDDLE,
    "last group, quantiles": QUANTILES,
    "window of 64": WINDOW,
    "window of 64, range": {**WINDOW, **MIDDLE},
    "window of 64, quantiles": {**WINDOW, **QUANTILES},
    "reward variance, range": {**VARIANCE, **MIDDLE},
    "reward variance, quantiles": {**VARIANCE, **QUANTILES},
    "30 categories": CATEGORIES,
    "30 categories, window, quantiles": {**CATEGORIES, **WINDOW, **QUANTILES},
    "entropy percentile 25": {"entropy_percentile": 25},
    "window, range, entropy percentile 25": {**WINDOW, **MIDDLE, "entropy_percentile": 25},
}


def strategies(size: int, rng: np.random.Generator, folder: Path) -> None:
    """Statistics of as many questions are made up, as a checkpoint would have them."""
    print(f"{'choice of ' + format(size, ',') + ' questions':>40} {'draw ms':>8} {'worst':>6} {'B/question':>11}")
    names = [f"question-{i}" for i in range(size)]
    categories = {name: str(i % 30) for i, name in enumerate(names)}
    right = rng.binomial(64, rng.random(size))
    for what, keys in STRATEGIES.items():
        config = ExperienceConfig.model_validate({"bucket_weight": "counts", **keys})
        buffer = ExperienceBuffer(config, GROUP_SIZE, SingleProcess(), folder, categories=categories)
        state = buffer._state
        rates = fill_stats(buffer, right)
        state.index.fill(names, bucket_of(rates, GROUP_SIZE), np.ones(size, np.int64))
        if config.entropy_percentile is not None:
            state.index.set_entropies(np.arange(size), rng.exponential(0.3, size).astype(np.float32))
        times = []
        for _ in range(REPEATS // 2):
            if config.entropy_percentile is not None:
                # As after a step, which stores something.
                state.index.set_entropies(np.zeros(1, np.int64), np.array([0.1], np.float32))
            times.append(draw_ms(buffer, rng))
        print(
            f"{what:>40} {statistics.median(times):>8.2f} {max(times):>6.1f} {buffer.index_nbytes / size:>11.1f}",
            flush=True,
        )


def fill_stats(buffer: ExperienceBuffer, right: np.ndarray) -> np.ndarray:
    """The questions' rates."""
    stats, rows = buffer.stats, np.arange(len(right))
    stats.reach(len(right) - 1)
    stats.put("attempts", rows, np.full(len(right), 64))
    if stats.kept.window:
        stats.put("known", rows, np.full(len(right), 64))
        stats.put("right", rows, right)
        return stats.window_rates(rows)
    if stats.kept.rewards:
        rates = right / 64
        stats.put("reward_mean", rows, rates)
        stats.put("reward_variance", rows, rates * (1 - rates))
        return variance_rate(*stats.reward_moments(rows))
    return right / 64


def answers(count: int, rng: np.random.Generator, folder: Path) -> None:
    buffer = new_buffer(folder / "run")
    ids = (rng.zipf(1.2, (count + 1000, TOKENS)) % 150_000).astype(np.int32)
    scale = np.where(rng.random((512, TOKENS)) < 0.6, 0.3, 0.0005)
    logprobs = (-rng.exponential(scale)).astype(np.float32)

    def lot(first: int, size: int) -> list[tuple[str, int, list[tuple[np.ndarray, np.ndarray]]]]:
        return [
            (
                f"question-{first + i}",
                4,
                [(ids[first + i + j], logprobs[(first + i + j) % 512]) for j in range(PER_QUESTION)],
            )
            for i in range(0, size, PER_QUESTION)
        ]

    for first in range(0, count, 1000):
        record(buffer, lot(first, 1000))
    each, memory_each = buffer.num_bytes / buffer.num_answers, buffer.own_table_nbytes / buffer.num_answers
    print(
        f"{buffer.num_answers:,} answers of {TOKENS} tokens: {each:,.0f} bytes on disk each, {memory_each:.1f} in "
        f"memory "
        f"({PER_QUESTION} a question)"
    )
    timed("record 1000 answers", lambda: record(buffer, lot(count, 1000)))
    drawn = buffer.draw(NUM_DRAWN, rng)
    timed("read the token ids of 64 drawn questions", lambda: buffer.token_ids(drawn))
    timed("read the 64 chosen answers", lambda: buffer.fetch([(name, 0) for name in drawn]))
    snapshot = timed("take a checkpoint (training waits)", buffer.snapshot)
    timed("write it (in the background)", lambda: snapshot.save(folder / "checkpoint"))
    opened = new_buffer(folder / "again")
    timed(f"open {count:,} answers", lambda: opened.load(folder / "checkpoint"))
    assert opened.num_answers == buffer.num_answers
    times = [
        timed("", lambda rank=rank: rank_buffer(rank, folder).load(folder / "checkpoint"), say=False)
        for rank in range(RANKS)
    ]
    print(f"open it as one of {RANKS} ranks: {max(times):.2f} s (slowest)")


class OneOf(SingleProcess):
    """One rank of several, alone: enough to open what it owns."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, RANKS


def rank_buffer(rank: int, folder: Path) -> ExperienceBuffer:
    return ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), GROUP_SIZE, OneOf(rank), folder / "ranks")


def new_buffer(folder: Path) -> ExperienceBuffer:
    return ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), GROUP_SIZE, SingleProcess(), folder)


def record(buffer: ExperienceBuffer, lot: list[tuple[str, int, list[tuple[np.ndarray, np.ndarray]]]]) -> None:
    """One group a question, with its correct answers filled up: the first ones are repeated, and stored once."""
    groups = []
    for name, correct, found in lot:
        right = [Trajectory(*found[i % len(found)], 1.0, False, "stop", 0) for i in range(max(correct, len(found)))]
        wrong = [Trajectory(*found[0], 0.0, False, "stop", 0)] * (GROUP_SIZE - len(right))
        groups.append(Group(Question(name, PROMPT, ""), (*right, *wrong)))
    buffer.record(groups, step=0, collect=True)


def draw_ms(buffer: ExperienceBuffer, rng: np.random.Generator) -> float:
    exclude = {f"question-{i}" for i in rng.integers(0, buffer.num_questions, NUM_DRAWN)}
    start = time.process_time()
    drawn = buffer.draw(NUM_DRAWN, rng, exclude)
    elapsed = time.process_time() - start
    assert len(set(drawn) - exclude) == NUM_DRAWN
    return 1000 * elapsed


def timed(what: str, work: Callable[[], object], *, say: bool = True):  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    if say:
        print(f"{what}: {elapsed:.3f} s")
    return result if say else elapsed


def memory() -> int:
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    main()
