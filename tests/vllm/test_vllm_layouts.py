"""Weights that ranks share reach every engine whole, and an engine that ranks share gets its part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_models import needs_vllm, save_model

pytestmark = [*needs_vllm, pytest.mark.distributed]

SCRIPT = Path(__file__).with_name("run_layout.py")

LAYOUTS = {
    "TP2, one engine on both ranks": (2, {"tensor_model_parallel_size": 2}, 2, ("llama", True)),
    "PP2, an engine on each rank": (2, {"pipeline_model_parallel_size": 2}, 1, ("qwen2", False)),
    "DP2, an engine on each rank": (2, {}, 1, ("qwen2", True)),
    "TP2 x PP2, an engine on each two ranks": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        2,
        ("qwen2", False),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_engine_agrees_with_the_actor_before_and_after_five_optimiser_steps(name, tmp_path):
    from launch import launch

    ranks, layout, engine_ranks, (family, tied) = LAYOUTS[name]
    folder = save_model(tmp_path / "model", family, tied=tied)
    launch(SCRIPT, ranks, [str(folder), json.dumps(layout), str(engine_ranks)], timeout_s=600)
