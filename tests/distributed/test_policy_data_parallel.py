"""Updates do not depend on how many data-parallel ranks share the batch, nor on how it is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "policy")]

from launch import launch, python_path  # noqa: E402
from policy_models import max_difference, random_sequences, save_model  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = HERE / "policy_data_parallel.py"


def run(folder: Path, ranks: int, share: str, checkpoint: str = "-") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    out = Path(tempfile.mkdtemp(dir=folder))
    launch(SCRIPT, ranks, [str(folder / "model"), str(out), share, checkpoint])
    return json.loads((out / "results.json").read_text()), torch.load(out / "weights.pt")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("data_parallel")
    save_model("qwen2", folder / "model")
    return folder, *run(folder, 1, "whole", str(folder / "saved_by_one"))


@pytest.mark.parametrize("share", ["uneven", "empty"])
def test_two_ranks_equal_one(share: str, one_rank: tuple[Path, list[dict[str, Any]], dict[str, Any]]) -> None:
    """Loss, gradient norm (a sum over ranks, not a mean) and weights after three AdamW steps."""
    folder, expected, expected_weights = one_rank
    results, weights = run(folder, 2, share)
    tokens = [sum(len(item.response_ids) for item in random_sequences(9, seed)) for seed in range(3)]
    for result, reference, count in zip(results, expected, tokens, strict=True):
        assert result["loss"] == pytest.approx(reference["loss"], abs=1e-5)
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
        assert result["tokens"] == reference["tokens"] == count
        assert not result["skipped"]
    assert max_difference(weights, expected_weights) < 1e-5


def test_two_ranks_continue_what_one_rank_saved(
    one_rank: tuple[Path, list[dict[str, Any]], dict[str, Any]],
) -> None:
    folder, _, _ = one_rank
    expected, expected_weights = run(folder, 1, "whole", str(folder / "saved_by_one"))
    results, weights = run(folder, 2, "uneven", str(folder / "saved_by_one"))
    assert [item["loss"] for item in results] == pytest.approx([item["loss"] for item in expected], abs=1e-5)
    assert max_difference(weights, expected_weights) < 1e-5


def test_a_group_of_one_can_be_left_and_made_again() -> None:
    twice = (
        "from exgrpo_megatron.config import ClusterConfig, PolicyConfig\n"
        "from exgrpo_megatron.policy.distributed import initialize\n"
        "for _ in range(2):\n"
        "    group = initialize(PolicyConfig(model_name='unused'), ClusterConfig(), seed=0)\n"
        "    print(group.rank, group.size)\n"
        "    group.shutdown()\n"
    )
    environment = os.environ | {"PYTHONPATH": python_path()}
    output = subprocess.run(
        [sys.executable, "-c", twice], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert output.splitlines() == ["0 1", "0 1"]


def test_a_failing_rank_is_reported_with_its_output(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit('boom')\ntime.sleep(60)\n")
    with pytest.raises(AssertionError, match=r"fails.py on 2 ranks failed[\s\S]*rank 1, exit code 1\nboom"):
        launch(script, 2, timeout_s=30)
