"""What it costs to watch over a run: a place and a sign of life, the watch beside a computing thread, a judgement.

    OMP_NUM_THREADS=1 python benchmarks/hang_watch.py [--beats-per-s 100]

A step enters about 25 places. The watch of a run looks every 10 s; here as often as is said, and the time of the same
products of matrices with it is given over that without, by turns, as the median of the ratios. A judgement is made only
where a process has waited for `cluster.hang_timeout_s`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from exgrpo_megatron.hang import Lookout, watched
from exgrpo_megatron.places import Places

REPEATS, ROUNDS, RANKS = 100_000, 15, 512


def main() -> None:
    given = sys.argv[sys.argv.index("--beats-per-s") + 1] if "--beats-per-s" in sys.argv else "100"
    places = Places()
    print(f"place: {microseconds(lambda: enter(places)):.2f} us; sign of life: {microseconds(places.advance):.2f} us")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=60))
    ratios = [with_watch(client, float(given)) for _ in range(ROUNDS)]
    print(f"computing with {given} looks a second over without: median {statistics.median(ratios):.4f}")
    print(
        f"one look: {1000 * look_s(client):.2f} ms; a judgement of {RANKS} ranks: {1000 * judgement_s(client):.0f} ms"
    )


def enter(places: Places) -> None:
    with places.inside("step 1: reward"):
        pass


def microseconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return 1e6 * (time.perf_counter() - started) / REPEATS


def with_watch(store: dist.Store, beats_per_s: float) -> float:
    """CPU time of the computing thread with the watch beside it, over that without."""
    places, matrix = Places(), torch.randn(256, 256)

    def compute() -> float:
        started = time.thread_time()
        for _ in range(400):
            with places.inside("step 1: update"):
                matrix @ matrix
        return time.thread_time() - started

    without = compute()
    lookout = Lookout(places, lambda: dist.PrefixStore("watch", store), 0, 1, 3600.0)
    lookout.beat_s = 1 / beats_per_s
    with tempfile.TemporaryDirectory() as folder, watched(lookout, 0, Path(folder), lambda *_: None):
        return compute() / without


def look_s(store: dist.Store) -> float:
    lookout = Lookout(Places(), lambda: dist.PrefixStore("look", store), 0, 1, 3600.0)
    lookout.look(0.0)
    started = time.perf_counter()
    for _ in range(100):
        lookout.look(0.0)
    return (time.perf_counter() - started) / 100


def judgement_s(store: dist.Store) -> float:
    shared = dist.PrefixStore("judgement", store)
    lookouts = [Lookout(Places(), lambda: shared, rank, RANKS, 1.0) for rank in range(RANKS)]
    for lookout in lookouts:
        lookout.look(0.0)
    for _ in range(50):
        started = time.perf_counter()
        lookouts[0].look(1.0)
        if lookouts[0].seen:
            return time.perf_counter() - started
    raise AssertionError("no judgement was made")


if __name__ == "__main__":
    main()
