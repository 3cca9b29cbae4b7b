"""What one layout saved, another one goes on from as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "policy")]

from launch import launch  # noqa: E402
from policy_models import max_difference, save_model  # noqa: E402
from test_layouts import CP2, OVERLAP, PP2, SP, TP2, ZERO  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ONE: tuple[int, dict[str, Any]] = (1, {})
CASES = {
    "TP2 to CP2": ("tied", "float32", (2, TP2), (2, CP2)),
    "PP2 to TP2 + sequence parallel": ("untied", "float32", (2, PP2), (2, TP2 | SP)),
    "CP2 + distributed optimizer to TP2": ("tied", "float32", (2, CP2 | ZERO), (2, TP2)),
    "one process to DP2 + distributed optimizer": ("untied", "float32", ONE, (2, ZERO | OVERLAP)),
    "DP2 + distributed optimizer to itself": ("untied", "float32", (2, ZERO), (2, ZERO)),
    "TP2 x DP2 + distributed optimizer to PP2 x DP2": ("tied", "float32", (4, TP2 | ZERO), (4, PP2 | ZERO)),
    # Layouts that round bfloat16 alike: the optimizer's float32 originals of the weights must survive.
    "bfloat16: PP2 to distributed optimizer": ("untied", "bfloat16", (2, PP2), (1, ZERO)),
    "bfloat16: distributed optimizer to one process": ("untied", "bfloat16", (1, ZERO), ONE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    save_model("qwen2", folder / "tied", num_hidden_layers=4)
    save_model("qwen3", folder / "untied", num_hidden_layers=4)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_on_another_layout(case: str, folder: Path) -> None:
    """Against four steps of one process: 1e-5; 1e-4 for the weights."""
    model, precision, before, after = CASES[case]
    checkpoint = folder / case.replace(" ", "_")
    whole = run(folder, model, precision, checkpoint, "whole", *ONE)
    first = run(folder, model, precision, checkpoint, "save", *before)
    second = run(folder, model, precision, checkpoint, "load", *after)
    assert second["version"] == 4
    found = [*first["steps"], *second["steps"]]
    for (loss, norm), (expected_loss, expected_norm) in zip(found, whole["steps"], strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert max_difference(second["weights"], whole["weights"]) < 1e-4


def run(
    folder: Path, model: str, precision: str, checkpoint: Path, part: str, ranks: int, layout: dict[str, Any]
) -> dict[str, Any]:
    out = folder / f"{model}_{precision}_{part}.pt"
    if part == "whole" and out.exists():
        return torch.load(out)
    args = [str(folder / model), str(out), json.dumps(layout), precision, str(checkpoint), part]
    launch(HERE / "run_resume.py", ranks, args, timeout_s=300)
    return torch.load(out)
