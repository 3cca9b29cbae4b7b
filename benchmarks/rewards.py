r"""Math-Verify checks a second through the worker pool, with and without the cache.

    python benchmarks/rewards.py [--workers 2] [--questions 4000] [--latex FILE.jsonl]

Numbers: every question has its own gold integer and a boxed answer that is right every other time, so no two checks
are alike. `--latex` takes a question file with an `answer` column (MATH-500) and grades every answer against itself
and against its neighbour.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.verifier import MathVerifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--latex", type=Path)
    options = parser.parse_args()
    numbers = [(f"so it is \\boxed{{{n + n % 2}}}", str(n)) for n in range(10_000, 10_000 + options.questions)]
    sets = {"numbers": numbers}
    if options.latex:
        answers = [json.loads(line)["answer"] for line in options.latex.read_text().splitlines()]
        pairs = zip(answers, [*answers[1:], answers[0]], strict=True)
        sets["latex"] = [(f"\\boxed{{{answer}}}", gold) for answer, other in pairs for gold in (answer, other)]
    for name, items in sets.items():
        measure(name, items, options.workers)


def measure(name: str, items: list[tuple[str, str]], workers: int) -> None:
    with MathVerifier(MathEnvConfig(num_workers=workers)) as verifier:
        start = time.perf_counter()
        verifier.grade([("\\boxed{1}", "1")])
        print(f"{name}: {len(items)} checks, {workers} workers ready after {time.perf_counter() - start:.2f} s")
        for label in ("first time", "all cached"):
            start = time.perf_counter()
            verdicts = verifier.grade(items)
            elapsed_s = time.perf_counter() - start
            correct = sum(verdict.status == "correct" for verdict in verdicts)
            print(f"  {label:10s} {len(items) / elapsed_s:10.0f} checks/s   ({correct} correct, {elapsed_s:.3f} s)")


if __name__ == "__main__":
    main()
