"""ExGRPO against on-policy GRPO on the embedded task: the same seeds, warm start, questions and number of steps.

    OMP_NUM_THREADS=1 python benchmarks/quickstart_comparison.py --seeds 1 2 3 --out runs/comparison

Runs recipes/quickstart.yaml and recipes/quickstart_grpo.yaml for each seed (resuming what is there) and prints a
Markdown table of held-out pass rates with 95% t-intervals of the mean over seeds, the share of groups with a non-zero
advantage, and the sampled answers. Four samples a held-out question at T=1, so one run's pass rate has a standard error
of about 2%.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
from pathlib import Path

from exgrpo_megatron.metric_sinks import read_metrics

RECIPES = {"ExGRPO (corrected)": "quickstart.yaml", "on-policy GRPO": "quickstart_grpo.yaml"}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Two-sided 95% quantiles of Student's t by number of seeds."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/comparison"))
    arguments = parser.parse_args()
    rows = {
        name: [_measured(recipe, seed, arguments.out) for seed in arguments.seeds] for name, recipe in RECIPES.items()
    }
    columns = list(next(iter(rows.values()))[0])
    print(f"| {len(arguments.seeds)} seeds | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, runs in rows.items():
        print(f"| {name} | " + " | ".join(_interval([run[column] for run in runs]) for column in columns) + " |")
    print(f"\npaired difference, T=1 at the end: {_interval(_differences(rows, 'T=1 at the end'))}")
    print(f"paired difference, greedy at the end: {_interval(_differences(rows, 'greedy at the end'))}")


def _measured(recipe: str, seed: int, out: Path) -> dict[str, float]:
    folder = out / f"{Path(recipe).stem}_seed{seed}"
    overrides = [f"grpo.seed={seed}", f"logger.log_dir={folder}", "eval.num_tests_per_prompt=4"]
    command = [sys.executable, "-m", "exgrpo_megatron", "train", f"recipes/{recipe}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = read_metrics(folder / "metrics.jsonl")
    evaluations = {record["step"]: record for record in records if "validation/pass_rate_t1" in record}
    steps = [record for record in records if "reward/pass_rate" in record]
    middle, last = evaluations[40], evaluations[max(evaluations)]
    return {
        "T=1 before": evaluations[0]["validation/pass_rate_t1"],
        "T=1 at step 40": middle["validation/pass_rate_t1"],
        "T=1 at the end": last["validation/pass_rate_t1"],
        "greedy before": evaluations[0]["validation/pass_rate_greedy"],
        "greedy at step 40": middle["validation/pass_rate_greedy"],
        "greedy at the end": last["validation/pass_rate_greedy"],
        "groups with a signal": statistics.mean(record["groups/mixed"] for record in steps),
        "s a step": statistics.median(record["time/step_s"] for record in steps),
    }


def _differences(rows: dict[str, list[dict[str, float]]], column: str) -> list[float]:
    first, second = rows.values()
    return [a[column] - b[column] for a, b in zip(first, second, strict=True)]


def _interval(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) not in T_95:
        return f"{mean:.3f}"
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


if __name__ == "__main__":
    main()
