"""Three updates on this rank's share of fixed sequences; run by test_policy_data_parallel.py under `launch`.

Arguments: model folder, output folder, share ("whole", "uneven" or "empty": what rank 0 gets), folder to save to or
load from ("-": neither). Rank 0 writes results.json and weights.pt.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from exgrpo_kernels.reference import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))

from policy_models import make_actor, random_sequences

from exgrpo_megatron.comm import all_gather_concat
from exgrpo_megatron.config import ClusterConfig, PolicyConfig
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel, check_alike, initialize
from exgrpo_megatron.policy.export import export_hf
from exgrpo_megatron.types import TrainSequence

CUTS = {"whole": 9, "uneven": 7, "empty": 0}


def main(model: Path, out: Path, share: str, checkpoint: str) -> None:
    group = initialize(PolicyConfig(model_name=str(model)), ClusterConfig(), seed=0)
    actor = make_actor(model, group, train_micro_batch_size=2)
    if checkpoint != "-" and Path(checkpoint).exists():
        actor.load(Path(checkpoint))
    results = []
    for seed in range(3):
        result = actor.update(share_of(group, random_sequences(9, seed), share), Objective(), temperature=1.0)
        fields = {key: value for key, value in vars(result).items() if key != "terms"}
        results.append({**fields, "tokens": len(all_gather_concat(group, list(result.terms.entropy)))})
    if checkpoint != "-" and not Path(checkpoint).exists():
        actor.save(Path(checkpoint))
    with pytest.raises(CheckpointError, match="is not empty"):
        actor.save(model)  # refused on every rank
    weights = dict(actor.export_weights())
    for other in group.all_gather(weights):
        assert all(torch.equal(weights[name], other[name]) for name in weights), "ranks hold different weights"
    check_export(actor, out, model)
    check_packages(group)
    if group.rank == 0:
        (out / "results.json").write_text(json.dumps(results))
        torch.save(weights, out / "weights.pt")
    group.barrier()
    group.shutdown()


def share_of(group: DataParallel, sequences: list[TrainSequence], share: str) -> list[TrainSequence]:
    cut = CUTS[share]
    return sequences[:cut] if group.rank == 0 else sequences[cut:]


def check_packages(group: DataParallel) -> None:
    """A machine that has other GPU packages ends the run on every rank, and rank 0's are named on each."""
    check_alike(group, "the same")
    if group.world_size > 1:
        with pytest.raises(ConfigError, match="do not find the same GPU packages: rank 0: found by 0"):
            check_alike(group, f"found by {group.rank}")


def check_export(actor: MegatronActor, out: Path, model: Path) -> None:
    """Every rank gets the report, and every rank the error."""
    report = export_hf(actor, out / "hf", model)
    assert len({str(asdict(other)) for other in actor.comm.all_gather(report)}) == 1
    with pytest.raises(CheckpointError, match="would replace the source model"):
        export_hf(actor, model, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
