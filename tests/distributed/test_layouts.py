"""Losses, gradient norms, log-probs, entropies and weights do not depend on the parallel layout (docs/parallel.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit" / "policy")]

from launch import launch  # noqa: E402
from policy_models import max_difference, save_model  # noqa: E402
from run_layout import MICRO_BATCH_SIZES, MODELS, SIZES  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
ZERO = {"optimizer": {"use_distributed_optimizer": True}}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
UNEVEN = {"num_layers_in_first_pipeline_stage": 3}
RECOMPUTE = {"activation_checkpointing": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, TP2),
    "PP2": (2, PP2),
    "TP2 + sequence parallel": (2, TP2 | SP),
    "DP2": (2, {}),
    "DP2 + distributed optimizer": (2, ZERO),
    "DP2 + distributed optimizer + overlap": (2, ZERO | OVERLAP),
    "PP2, 3 layers and 1": (2, PP2 | UNEVEN),
    "TP2 + sequence parallel + recomputation": (2, TP2 | SP | RECOMPUTE),
    "PP4": (4, PP4),
    "PP2 x DP2, 2 chunks a stage + distributed optimizer + overlap": (4, PP2 | VPP2 | ZERO | OVERLAP),
    "TP2 x PP2": (4, TP2 | PP2),
    "TP2 x PP2 + sequence parallel": (4, TP2 | PP2 | SP),
    "TP2 x DP2": (4, TP2),
    "TP2 x DP2 + distributed optimizer": (4, TP2 | ZERO),
    "PP2 x DP2": (4, PP2),
    "PP2 x DP2 + distributed optimizer + overlap": (4, PP2 | ZERO | OVERLAP),
}
QUANTITIES = ("loss", "grad_norm", "logprobs", "entropies", "weights")

Found = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, family in MODELS.items():
        save_model(family, folder / name, **SIZES)
    return folder


@pytest.fixture(scope="module")
def one_process(models: Path) -> Found:
    return run(models, 1, {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_what_one_process_gives(name: str, models: Path, one_process: Found) -> None:
    """Float32, four AdamW steps, micro-batches of 1, 2 and all sequences, which have different lengths, and of which
    the first data-parallel rank has one more than the second, or all. 1e-5; of the gradient norm (up to 8) relatively.
    """
    found = run(models, *LAYOUTS[name])
    for model in MODELS:
        for size in MICRO_BATCH_SIZES:
            differences = compare(found[model, size], one_process[model, size])
            assert max(differences.values()) < 1e-5, (name, model, size, differences)


def test_one_process_gives_the_same_for_any_micro_batch_size(one_process: Found) -> None:
    for model in MODELS:
        for size in MICRO_BATCH_SIZES[1:]:
            differences = compare(one_process[model, size], one_process[model, MICRO_BATCH_SIZES[0]])
            assert max(differences.values()) < 1e-5, differences


def run(models: Path, ranks: int, layout: dict[str, Any]) -> Found:
    out = models / "found.pt"
    launch(HERE / "run_layout.py", ranks, [str(models), str(out), json.dumps(layout)], timeout_s=600)
    return torch.load(out, weights_only=False)


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each quantity over all steps; relative for the gradient norm."""
    largest = dict.fromkeys(QUANTITIES, 0.0)
    for mine, other in zip(ours["steps"], theirs["steps"], strict=True):
        for quantity in QUANTITIES[:-1]:
            difference = float(np.abs(np.asarray(mine[quantity]) - np.asarray(other[quantity])).max())
            scale = other["grad_norm"] if quantity == "grad_norm" else 1.0
            largest[quantity] = max(largest[quantity], difference / scale)
    largest["weights"] = max_difference(ours["weights"], theirs["weights"])
    return largest


def differences_table() -> str:
    """The table of docs/parallel.md, as Markdown; `python tests/distributed/test_layouts.py` prints it."""
    import tempfile

    rows = ["| layout | loss | gradient norm | log-prob | entropy | weights |", "|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for name, family in MODELS.items():
            save_model(family, Path(folder) / name, **SIZES)
        reference = run(Path(folder), 1, {})
        for name, layout in LAYOUTS.items():
            found = run(Path(folder), *layout)
            largest = [compare(found[case], reference[case]) for case in found]
            values = [max(differences[quantity] for differences in largest) for quantity in QUANTITIES]
            rows.append(f"| {name} | " + " | ".join(f"{value:.0e}" for value in values) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(differences_table() + "\n")
