"""Losses, gradient norms, log-probs, entropies and weights do not depend on the parallel layout, nor on how sequences
are put into micro-batches (docs/parallel.md)."""

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
from run_layout import BATCHINGS, BFLOAT16, MEAN_ENTROPY, MODELS, SIZES  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
SP = {"sequence_parallel": True}
ZERO = {"optimizer": {"use_distributed_optimizer": True}}
OVERLAP: dict[str, Any] = {
    "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}
}
# The models have 35,000 parameters and more: this makes seven buckets at least.
BUCKETS = {"distributed_data_parallel_config": OVERLAP["distributed_data_parallel_config"] | {"bucket_size": 4000}}
UNEVEN = {"num_layers_in_first_pipeline_stage": 3}
RECOMPUTE = {"activation_checkpointing": True}

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "TP2": TP2,
        "PP2": PP2,
        "TP2 + sequence parallel": TP2 | SP,
        "DP2": {},
        "DP2 + distributed optimizer": ZERO,
        "DP2 + distributed optimizer + overlap": ZERO | OVERLAP,
        "DP2 + distributed optimizer + overlap, small buckets": ZERO | BUCKETS,
        "PP2, 3 layers and 1": PP2 | UNEVEN,
        "TP2 + sequence parallel + recomputation": TP2 | SP | RECOMPUTE,
        "CP2": CP2,
        "CP2 + distributed optimizer + overlap + recomputation": CP2 | ZERO | OVERLAP | RECOMPUTE,
    },
    4: {
        "PP4": PP4,
        "DP4": {},
        "TP2 x PP2": TP2 | PP2,
        "TP2 x PP2 + sequence parallel": TP2 | PP2 | SP,
        "TP2 x DP2": TP2,
        "TP2 x DP2 + distributed optimizer": TP2 | ZERO,
        "PP2 x DP2": PP2,
        "PP2 x DP2 + distributed optimizer + overlap": PP2 | ZERO | OVERLAP,
        "PP2 x DP2, 2 chunks a stage + distributed optimizer + overlap": PP2 | VPP2 | ZERO | OVERLAP,
        "CP2 x TP2": CP2 | TP2,
        "CP2 x TP2 + sequence parallel": CP2 | TP2 | SP,
        "CP2 x PP2": CP2 | PP2,
        "CP2 x DP2 + distributed optimizer": CP2 | ZERO,
    },
}
"""By number of processes; those of one number are tried by the same processes, one after another."""
CASES = (("tied", "packed"), ("untied", "dynamic"), ("untied", "two a micro-batch"))
"""Model and batching of every layout; on one process every batching is tried with both models."""
REFERENCE = "one a micro-batch"
OF_THEIR_OWN = (MEAN_ENTROPY, BFLOAT16)
"""Batchings whose numbers are not the reference's: on every layout they are those of one process."""
QUANTITIES = ("loss", "grad_norm", "logprobs", "entropies", "weights")

Found = dict[tuple[str, str], dict[str, Any]]
"""By model and batching."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_process(models: Path) -> Found:
    return run_on_one(models)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda ranks: f"{ranks} processes")
def on_layouts(request: pytest.FixtureRequest, models: Path) -> dict[str, Found]:
    return run(models, request.param, layouts_of(request.param))


def test_layouts_give_what_one_process_gives(on_layouts: dict[str, Found], one_process: Found) -> None:
    """Four AdamW steps on 9 sequences of up to 56 tokens, of which with two data-parallel ranks the first has
    5, or (dynamic) all. 1e-5; of the gradient norm (up to 20) relatively. The loss is the reference's on one process,
    and computed from all logits, or in chunks, on the layouts. With bfloat16, a weight that both ends of the model
    share has the same gradient whether they are on one stage or on two: what is added of both is float32.
    """
    wrong = {
        (name, *case): differences
        for name, cases in on_layouts.items()
        for case, found in cases.items()
        if not max((differences := compare(found, one_process[reference(case)])).values()) < 1e-5
    }
    assert not wrong, wrong


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("batching", [name for name in BATCHINGS if name not in (REFERENCE, *OF_THEIR_OWN)])
def test_one_process_gives_the_same_for_any_batching(model: str, batching: str, one_process: Found) -> None:
    differences = compare(one_process[model, batching], one_process[model, REFERENCE])
    assert max(differences.values()) < 1e-5, differences


def saved_models(folder: Path) -> Path:
    for name, family in MODELS.items():
        save_model(family, folder / name, **SIZES)
    return folder


def layouts_of(ranks: int) -> dict[str, dict[str, Any]]:
    rounded_alike = (("tied", BFLOAT16), ("untied", BFLOAT16))
    more = {
        "CP2": (("tied", MEAN_ENTROPY),),
        "PP2": rounded_alike,
        "DP2 + distributed optimizer + overlap, small buckets": rounded_alike,
        "PP2 x DP2, 2 chunks a stage + distributed optimizer + overlap": rounded_alike,
    }
    return {
        name: {"megatron_cfg": layout, "cases": [*CASES, *more.get(name, ())]}
        for name, layout in LAYOUTS[ranks].items()
    }


def reference(case: tuple[str, str]) -> tuple[str, str]:
    """The case on one process that a case is held to."""
    model, batching = case
    return (model, batching if batching in OF_THEIR_OWN else REFERENCE)


def run_on_one(models: Path) -> Found:
    cases = [(model, batching) for model in MODELS for batching in BATCHINGS]
    return run(models, 1, {"one": {"megatron_cfg": {}, "cases": cases}})["one"]


def run(models: Path, ranks: int, layouts: dict[str, Any]) -> dict[str, Found]:
    out = models / f"{ranks}.pt"
    launch(HERE / "run_layout.py", ranks, [str(models), str(out), json.dumps(layouts)], timeout_s=1200)
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

    def add(name: str, differences: list[dict[str, float]]) -> None:
        values = [max(found[quantity] for found in differences) for quantity in QUANTITIES]
        rows.append(f"| {name} | " + " | ".join(f"{value:.0e}" for value in values) + " |")

    with tempfile.TemporaryDirectory() as folder:
        models = saved_models(Path(folder))
        one = run_on_one(models)
        for batching in BATCHINGS:
            if batching not in (REFERENCE, *OF_THEIR_OWN):
                add(
                    f"1 process, {batching}", [compare(one[model, batching], one[model, REFERENCE]) for model in MODELS]
                )
        for ranks in LAYOUTS:
            for name, found in run(models, ranks, layouts_of(ranks)).items():
                add(name, [compare(found[case], one[reference(case)]) for case in found])
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(differences_table() + "\n")
