"""`exgrpo show` against Megatron-Core: the ranks of every group, and allocated bytes, on 4 processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "policy")]

from launch import launch  # noqa: E402
from policy_models import save_model  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_groups_and_allocations_are_as_planned_on_every_layout(tmp_path: Path) -> None:
    """To the byte, in both precisions: weights, gradients and optimizer with tensor parallelism, with stages, even,
    uneven or in chunks, of which the first and the last hold a tied embedding, and with optimizer state shared between
    2 data or context parallel ranks."""
    for family in ("qwen2", "qwen3"):
        save_model(family, tmp_path / family, num_hidden_layers=4)
    launch(HERE / "run_plan.py", 4, [str(tmp_path)], timeout_s=600)
