"""Four updates, or two, a checkpoint and two more on another layout; run by test_resume_layouts.py under `launch`.

Arguments: model folder, output file, policy.megatron_cfg as JSON, precision, checkpoint folder, and "save" (steps 0 and
1, then save), "load" (steps 2 and 3) or "whole". The main process writes losses, gradient norms and weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from exgrpo_kernels.reference import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))

from policy_models import make_actor, random_sequences

from exgrpo_megatron.config import ClusterConfig, MegatronConfig, OptimizerConfig, PolicyConfig
from exgrpo_megatron.policy.distributed import initialize

STEPS = {"save": range(2), "load": range(2, 4), "whole": range(4)}


def main(model: Path, out: Path, layout: str, precision: str, checkpoint: Path, part: str) -> None:
    config = MegatronConfig(**json.loads(layout))
    comm = initialize(PolicyConfig(model_name="unused", megatron_cfg=config), ClusterConfig(), seed=0)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_eps=1e-4)
    actor = make_actor(model, comm, optimizer, train_micro_batch_size=2, precision=precision, megatron_cfg=config)
    if part == "load":
        actor.load(checkpoint)
        assert actor.version == 2
    updates = [
        actor.update(random_sequences(9, seed)[comm.rank :: comm.size], Objective(), temperature=1.0)
        for seed in STEPS[part]
    ]
    if part == "save":
        actor.save(checkpoint)
    weights = dict(actor.export_weights())
    if comm.is_main:
        steps = [(update.loss, update.grad_norm) for update in updates]
        torch.save({"steps": steps, "weights": weights, "version": actor.version}, out)
    comm.barrier()
    comm.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]), sys.argv[6])
