"""A run that goes on with another number of processes is the run that was never stopped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from launch import python_path

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ALIKE = (
    "freshness/",
    "guards/",
    "alarm/",
    "reward/",
    "groups/",
    "experience/",
    "policy/",
    "ratio_",
    "data/",
    "rollout/answers",
    "rollout/tokens",
    "rollout/truncated",
)
"""Metrics that describe the run, not the machine."""
OF_A_LAYOUT = ("experience/shard_answers", "experience/stored_bytes", "rollout/tokens_per_s", "policy/padding_share")


def write_recipe(folder: Path, model: Path) -> None:
    recipe = {
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "seed": 5, "val_period": 0},
        "data": {"train": {"generator": "chain_arithmetic", "generator_size": 24}, "max_input_seq_length": 32},
        "policy": {
            "model_name": str(model),
            "train_global_batch_size": 16,
            "max_total_sequence_length": 80,
            "generation": {"max_new_tokens": 48},
            "megatron_cfg": {"optimizer": {"lr": 1e-4, "use_distributed_optimizer": True}},
        },
        # Replay is off at first and turned on by a pass rate, so that the schedule has a state to carry over.
        # The guard is crossed as soon as anything is replayed, and retired questions come back.
        "experience": {
            "start_pass_rate": 0.05,
            "guards": {"max_kl_replayed": 1e-7, "action": "clip", "hold_steps": 2},
            "return_retired": {"share": 0.5, "period": 2},
        },
        "env": {"math": {"num_workers": 1}},
        "checkpointing": {"save_period": 100, "export_hf": False, "keep_last_n": 3},
        "logger": {"log_dir": "run", "tensorboard_enabled": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def train(folder: Path, processes: int, until: int) -> str:
    launcher = [] if processes == 1 else [
        "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]  # fmt: skip
    command = [
        sys.executable,
        *launcher,
        "-m",
        "exgrpo_megatron",
        "train",
        "recipe.yaml",
        f"grpo.max_num_steps={until}",
    ]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, half_trained_model: Path) -> tuple[Path, Path]:
    """The folders of a run of six steps on one process, and of one on 2, 4 and 1 processes, two steps each."""
    straight, moved = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("moved")
    for folder in (straight, moved):
        write_recipe(folder, half_trained_model)
    train(straight, 1, 6)
    for processes, until in ((2, 2), (4, 4), (1, 6)):
        output = train(moved, processes, until)
        assert ("resuming from" in output) == (until > 2)
    return straight / "run", moved / "run"


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_losses_and_what_is_replayed_are_those_of_the_run_that_was_not_stopped(runs: tuple[Path, Path]) -> None:
    straight, moved = (metrics_of(run) for run in runs)
    assert [line["step"] for line in moved] == [line["step"] for line in straight] == [1, 2, 3, 4, 5, 6]
    assert straight[0]["experience/replay_on"] == 0
    assert sum(line["experience/replayed_questions"] for line in straight[2:]) >= 8
    assert sum(line["guards/held"] for line in straight) >= 1
    for mine, theirs in zip(moved, straight, strict=True):
        for name, value in theirs.items():
            if name.startswith(ALIKE) and name not in OF_A_LAYOUT:
                # Of thousands of tokens one extreme decides: what layouts round otherwise shows in full there.
                close = 5e-5 if name.endswith(("/min", "/max")) else 1e-5
                assert mine[name] == pytest.approx(value, abs=close, rel=close), (theirs["step"], name)


def test_experience_order_and_position_are_the_same_at_the_end(
    runs: tuple[Path, Path], stored_rows: Callable[[Path], dict[tuple[str, int], Any]]
) -> None:
    straight, moved = (run / "checkpoints" / "step_000006" for run in runs)
    for key in ("order", "schedule", "guards", "freshness", "alarms", "retirement", "alarm", "skipped_updates", "step"):
        left, right = (json.loads((folder / "state.json").read_text())[key] for folder in (straight, moved))
        assert left == right, key
    left, right = (folder / "experience" for folder in (straight, moved))
    assert (left / "experience.json").read_text() == (right / "experience.json").read_text()
    mine, theirs = (stored_rows(folder) for folder in (right, left))
    assert mine.keys() == theirs.keys()
    assert len(mine) > 10
    for key, (answer, logprobs) in theirs.items():
        assert mine[key][0] == answer
        ours = np.frombuffer(mine[key][1], np.float32)
        np.testing.assert_allclose(ours, np.frombuffer(logprobs, np.float32), rtol=0, atol=1e-5)


def test_each_number_of_processes_wrote_as_many_files(
    runs: tuple[Path, Path], stored_rows: Callable[[Path], dict[tuple[str, int], Any]]
) -> None:
    """And what they hold together grows from checkpoint to checkpoint."""
    checkpoints = sorted((runs[1] / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_000002", "step_000004", "step_000006"]
    files = [sorted((path / "experience").glob("index-*.parquet")) for path in checkpoints]
    assert [len(some) for some in files] == [2, 4, 1]
    totals = [len(stored_rows(path / "experience")) for path in checkpoints]
    # Of so few questions a rank may own none.
    rows = [[pq.ParquetFile(path).metadata.num_rows for path in some] for some in files]
    assert [sum(some) for some in rows] == totals
    assert all(sum(map(bool, some)) > 1 for some in rows[:2])
    assert totals[0] < totals[1]
