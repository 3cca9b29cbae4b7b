"""A run folder with made-up but realistic metrics, for the tests of the reports."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

RECIPE = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 8, max_num_steps: 60}
data: {train: {generator: chain_arithmetic}}
policy: {model_name: "embedded:chain-qwen2"}
"""

REPLAY_START = 7


def write_run(
    folder: Path, num_steps: int = 60, replay: bool = True, validation: bool = True, recipe: str = RECIPE
) -> Path:
    """`folder` as a run leaves it after `num_steps`."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe if replay else recipe + "experience: {enabled: false}\n")
    generator = np.random.default_rng(0)
    records = [{"step": 0, **_validation(0)}] if validation else []
    for step in range(1, num_steps + 1):
        records.append({"step": step, **_step(step, generator), **(_replay(step, generator) if replay else {})})
        if validation and step % 10 == 0:
            records.append({"step": step, **_validation(step)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def _validation(step: int) -> dict[str, float]:
    progress = 1 - math.exp(-step / 15)
    return {
        "validation/pass_rate_t1": 0.2 + 0.5 * progress,
        "validation/pass_rate_greedy": 0.21 + 0.68 * progress,
        "validation/response_length": 11 + 18 * progress,
        "validation/truncated": 0,
    }


def _step(step: int, generator: np.random.Generator) -> dict[str, Any]:
    progress, noise = 1 - math.exp(-step / 15), generator.normal(0, 0.06)
    none = float(np.clip(0.35 * (1 - progress) + noise / 2, 0, 1))
    full = float(np.clip(0.15 * progress + noise / 3, 0, 1))
    times = {"draw": 0.001, "rollout": 0.2, "reward": 0.02, "old_logprobs": 0.12, "update": 0.45, "push": 0.01}
    times |= {"record": 0.004}
    times = {name: value * float(generator.uniform(0.8, 1.3)) for name, value in times.items()}
    return {
        "reward/pass_rate": float(np.clip(0.2 + 0.4 * progress + noise, 0, 1)),
        "reward/pass_rate_fresh": float(np.clip(0.2 + 0.35 * progress + 1.3 * noise, 0, 1)),
        "groups/none_correct": none,
        "groups/mixed": 1 - none - full,
        "groups/all_correct": full,
        "experience/replay_on": 0,
        "policy/entropy": 0.09 + 0.28 * math.exp(-step / 8) + abs(noise) / 5,
        "policy/grad_norm": 0.07 + abs(noise),
        "policy/skipped_updates": int(step == 33),
        "ratio_fresh/max": 1.0 + abs(noise),
        "rollout/response_length": 10 + 20 * progress + 20 * noise,
        "rollout/tokens_per_s": 28_000,
        **{f"time/{name}_s": value for name, value in times.items()},
        "time/step_s": sum(times.values()),
    }


def _replay(step: int, generator: np.random.Generator) -> dict[str, Any]:
    grown = 12 * (1 - math.exp(-step / 25))
    buckets = {
        f"experience/bucket_{k}": int(grown * (1 + abs(k - 4)) * generator.uniform(0.7, 1.3)) for k in range(1, 8)
    }
    values = {
        **buckets,
        "experience/buffer_questions": sum(buckets.values()),
        "experience/stored_answers": int((1 + step / 40) * sum(buckets.values())),
        "experience/retired": int(1.4 * step),
    }
    if step >= REPLAY_START:
        low, high = generator.lognormal(-0.5, 0.4), generator.lognormal(0.5, 0.3)
        spread = {"p01": low, "p50": 1.0, "p99": high, "max": high * 4, "min": low / 20, "ess": 0.8}
        values |= {f"ratio_replayed/{stat}": float(value) for stat, value in spread.items()}
        values |= {"experience/replay_on": 1, "experience/replayed_questions": 16, "time/select_s": 0.03}
    return values
