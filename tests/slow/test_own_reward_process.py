"""The example of a reward and questions of one's own, as it is started: alone, and by two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exgrpo_megatron.metric_sinks import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0"),
)

pytestmark = pytest.mark.slow


def run(folder, *launcher):
    """Metrics of the run, and what its script prints at the end."""
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    done = subprocess.run(
        [sys.executable, *launcher, "examples/own_reward.py"], cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^reward of the last step: (\S+); the model: (\S+)$", done.stdout, re.MULTILINE)
    return read_metrics(folder / "runs" / "own" / "metrics.jsonl"), said


def test_the_example_learns_the_same_alone_and_by_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    alone, said = run(folder)
    rewards = [record["reward/mean"] for record in alone]
    # One of the vocabulary's 20 tokens is the digit, so a random model earns about 1 / 20, and that learns nearly all.
    assert len(rewards) == 60
    assert rewards[0] < 0.1
    assert max(rewards[-5:]) > 0.7
    assert said == [(f"{rewards[-1]:.2f}", "runs/own/hf")]
    assert (folder / "runs" / "own" / "hf" / "model.safetensors").is_file()

    shared, said = run(tmp_path_factory.mktemp("shared"), *TORCHRUN)
    # The same questions, samples and rewards: sums of another order move them by a few answers late in the run only.
    assert [record["reward/mean"] for record in shared][:20] == pytest.approx(rewards[:20], abs=1e-3)
    assert len(said) == 1  # rank 0 alone prints
