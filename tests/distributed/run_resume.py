"""Updates with a checkpoint in the middle, on one layout; run by test_resume_layouts.py under `launch`.

Arguments: model folder, output file, policy.megatron_cfg as JSON, precision, folder of the checkpoint to go on from (or
""), and folder of the one to write. Without the first there are steps 0 to 3, and the checkpoint is taken after step 1
and written by another thread while step 2 runs. With it there are steps 2 and 3, and the checkpoint is what was read,
saved again. The main process writes losses, gradient norms and weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from exgrpo_kernels.reference import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))

from policy_models import make_actor, random_sequences

from exgrpo_megatron.background import in_background
from exgrpo_megatron.config import ClusterConfig, MegatronConfig, OptimizerConfig, PolicyConfig
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.types import UpdateResult


def main(model: Path, out: Path, layout: str, precision: str, before: str, after: Path) -> None:
    config = MegatronConfig(**json.loads(layout))
    comm = initialize(PolicyConfig(model_name="unused", megatron_cfg=config), ClusterConfig(), seed=0)
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_eps=1e-4)
    actor = make_actor(model, comm, optimizer, train_micro_batch_size=2, precision=precision, megatron_cfg=config)
    updates = []
    if before:
        actor.load(Path(before))
        assert actor.version == 2
        actor.save(after)
        updates += [step(actor, seed) for seed in (2, 3)]
    else:
        updates += [step(actor, seed) for seed in (0, 1)]
        saving = actor.begin_save(after, snapshot=True)
        written = in_background(saving.write)
        updates.append(step(actor, 2))
        written.result()
        saving.finish()
        updates.append(step(actor, 3))
    weights = dict(actor.export_weights())
    if comm.is_main:
        steps = [(update.loss, update.grad_norm) for update in updates]
        torch.save({"steps": steps, "weights": weights, "version": actor.version}, out)
    comm.barrier()
    comm.shutdown()


def step(actor: MegatronActor, seed: int) -> UpdateResult:
    mine = random_sequences(9, seed)[actor.comm.rank :: actor.comm.size]
    return actor.update(mine, Objective(), temperature=1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], Path(sys.argv[6]))
