"""Updates of small models on a parallel layout; run by test_layouts.py under `launch`.

Arguments: folder with one model folder for each of MODELS, output file, policy.megatron_cfg as JSON. The main process
writes what it found, by (model, micro-batch size); every process checks that the others found the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exgrpo_kernels.reference import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))

from policy_models import make_actor, random_sequences

from exgrpo_megatron.comm import all_gather_concat
from exgrpo_megatron.config import ClusterConfig, MegatronConfig, OptimizerConfig, PolicyConfig
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel, initialize

MODELS = {"tied": "qwen2", "untied": "qwen3"}
"""qwen2 has biases, qwen3 norms of queries and keys, which tensor-parallel ranks share."""
SIZES = {"num_hidden_layers": 4}
MICRO_BATCH_SIZES = (1, 2, 9)
SEQUENCES = 9
STEPS = 4
# An epsilon above the rounding of a gradient: below it AdamW makes a whole step of what is noise on every layout.
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_eps=1e-4)


def main(models: Path, out: Path, layout: dict[str, Any]) -> None:
    config = MegatronConfig(**layout)
    comm = initialize(PolicyConfig(model_name="unused", megatron_cfg=config), ClusterConfig(), seed=0)
    found = {}
    for name in MODELS:
        for size in MICRO_BATCH_SIZES:
            actor = make_actor(
                models / name,
                comm,
                OPTIMIZER,
                train_micro_batch_size=size,
                logprob_batch_size=size,
                megatron_cfg=config,
            )
            found[name, size] = trained(actor, comm, share(comm, all_on_first=size == SEQUENCES))
    if comm.is_main:
        torch.save(found, out)
    comm.barrier()
    comm.shutdown()


def trained(actor: MegatronActor, comm: DataParallel, members: range) -> dict[str, Any]:
    """Updates of which this data-parallel rank has the sequences `members`.

    Loss and gradient norm of every step, log-probs and entropies after each, and the weights at the end."""
    steps = []
    for seed in range(STEPS):
        sequences = random_sequences(SEQUENCES, seed)
        mine = [sequences[index] for index in members]
        update = actor.update(mine, Objective(), temperature=0.8)
        scores = actor.score([(item.prompt_ids, item.response_ids) for item in mine], temperature=0.8)
        same_on_all([score.logprobs.tolist() for score in scores], comm)
        same_on_all([getattr(update.terms, name).tolist() for name in vars(update.terms)], comm)
        assert not update.skipped
        ordered = gathered(scores, members, comm)
        steps.append(
            {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "logprobs": np.concatenate([score.logprobs for score in ordered]),
                "entropies": np.concatenate([score.entropies for score in ordered]),
            }
        )
        every_loss = comm.all_gather((update.loss, update.grad_norm, update.learning_rate))
        assert len(set(every_loss)) == 1, every_loss
    weights = dict(actor.export_weights())
    digest = {name: (tensor.double().sum().item(), tensor.std().item()) for name, tensor in weights.items()}
    assert all(other == digest for other in comm.all_gather(digest)), "data-parallel ranks hold different weights"
    same_on_all(digest, comm)
    return {"steps": steps, "weights": weights}


def share(comm: DataParallel, *, all_on_first: bool) -> range:
    """Uneven: with two data-parallel ranks 5 and 4 of 9 sequences, or 9 and none."""
    if all_on_first:
        return range(SEQUENCES if comm.rank == 0 else 0)
    return range(comm.rank, SEQUENCES, comm.size)


def gathered(scores: list[Any], members: range, comm: DataParallel) -> list[Any]:
    """The scores of all sequences, in order."""
    indexed = list(zip(members, scores, strict=True))
    return [score for _, score in sorted(all_gather_concat(comm, indexed), key=lambda pair: pair[0])]


def same_on_all(value: Any, comm: DataParallel) -> None:
    """On the processes that share the model."""
    differs = comm.agreed(value) != value
    assert not comm.anywhere(differs), "processes that share the model found different numbers"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
