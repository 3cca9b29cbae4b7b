"""`exgrpo sweep` from the command line: real runs of a tiny recipe."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from exgrpo_megatron.metric_sinks import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
SMALL = {
    "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 2, "val_period": 1},
    "data": {
        "train": {"generator": "chain_arithmetic", "generator_size": 24},
        "validation": {"generator": "chain_arithmetic", "generator_size": 4},
        "max_input_seq_length": 32,
    },
    "policy": {
        "model_name": "embedded:chain-qwen2",
        "train_global_batch_size": 4,
        "max_total_sequence_length": 40,
        "generation": {"max_new_tokens": 8},
    },
    "env": {"math": {"num_workers": 1}},
    "checkpointing": {"enabled": False, "export_hf": False},
    "logger": {"tensorboard_enabled": False},
}

pytestmark = pytest.mark.slow


def sweep(folder, *args):
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    return subprocess.run(
        [sys.executable, "-m", "exgrpo_megatron", "sweep", "tiny.yaml", "--out", "out", "--jobs", "2", *args],
        cwd=folder, env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip


def test_a_failed_run_is_reported_the_rest_goes_on_and_a_second_call_does_what_is_missing(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(SMALL))
    arms = ("--arm", "good:", "--arm", "broken: policy.model_name=nowhere")
    first = sweep(tmp_path, "--seeds", "1", *arms)
    assert first.returncode == 1, first
    assert "good, seed 1: finished after" in first.stdout
    assert "broken, seed 1: failed after" in first.stdout
    log = tmp_path / "out" / "broken" / "seed-1.log"
    assert "nowhere" in log.read_text()
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| good | 1 of 1 | 0.000 | - |" in table
    assert "- broken, seed 1: failed: exit code 2: error:" in table

    done = tmp_path / "out" / "good" / "seed-1.log"
    before = done.read_bytes()
    second = sweep(tmp_path, "--seeds", "1,2", "--arm", "good:")
    assert second.returncode == 0, second
    assert "1 arms x 2 seeds: 2 runs, 1 done before" in second.stdout
    assert done.read_bytes() == before
    runs = [read_metrics(tmp_path / "out" / "good" / f"seed-{seed}" / "metrics.jsonl") for seed in (1, 2)]
    rates = [run[-1]["validation/pass_rate_t1"] for run in runs]
    with (tmp_path / "out" / "table.csv").open() as file:
        row = next(csv.DictReader(file))
    # Two steps of two questions and two answers.
    assert (row["metric"], row["answers"], row["known"]) == ("validation/pass_rate_t1", "8.0", "2")
    assert float(row["mean"]) == pytest.approx(sum(rates) / 2)
    assert json.loads((tmp_path / "out" / "table.json").read_text())["missing"] == []
    assert (tmp_path / "out" / "bands.png").stat().st_size > 10_000
