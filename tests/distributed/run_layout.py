"""Updates of small models on parallel layouts, one after another; run by test_layouts.py under `launch`.

Arguments: folder with one model folder for each of MODELS, output file, and as JSON {name: {"megatron_cfg": ...,
"cases": [[model, batching], ...]}}. The main process writes what it found, by name of the layout, model and batching;
every process checks that the others found the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from exgrpo_kernels.reference import Objective

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))

from policy_models import make_actor, random_sequences

from exgrpo_megatron.comm import all_gather_concat
from exgrpo_megatron.config import MegatronConfig, OptimizerConfig
from exgrpo_megatron.policy import backend
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel, lay_out

MODELS = {"tied": "qwen2", "untied": "qwen3"}
"""qwen2 has biases, qwen3 norms of queries and keys, which tensor-parallel ranks share."""
SIZES = {"num_hidden_layers": 4}
LONGEST = 56
BATCHINGS: dict[str, dict[str, Any]] = {
    "one a micro-batch": {"train_micro_batch_size": 1, "logprob_batch_size": 1, "loss_kernel": "reference"},
    "two a micro-batch": {"train_micro_batch_size": 2, "logprob_batch_size": 2, "loss_kernel": "logits"},
    "all in one": {"train_micro_batch_size": 9, "logprob_batch_size": 9},
    "two and their mean entropy": {"train_micro_batch_size": 2, "logprob_batch_size": 2},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 100, "logprob_mb_tokens": 150}},
    "packed": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 100, "logprob_mb_tokens": 150},
        "logprob_chunk_size": 16,
    },
    "one a micro-batch, bfloat16": {"train_micro_batch_size": 1, "logprob_batch_size": 1, "precision": "bfloat16"},
}
BFLOAT16 = "one a micro-batch, bfloat16"
"""Its numbers are rounded alike on every layout that neither tensor nor context parallelism cut up."""
MEAN_ENTROPY = "two and their mean entropy"
"""Here the loss has the mean entropy of every micro-batch, and depends on what is in it."""
ALL_ON_FIRST = ("all in one", "dynamic")
"""Here the first data-parallel rank has all sequences and the others none; else each has its share."""
SEQUENCES = 9
STEPS = 4
# An epsilon above the rounding of a gradient: below it AdamW makes a whole step of what is noise on every layout.
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, adam_eps=1e-4)


def main(models: Path, out: Path, layouts: dict[str, dict[str, Any]]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    backend.install()
    found = {}
    for name, case in layouts.items():
        sys.stdout.write(f"{name}\n")
        # A name space of its own in the store: what is in the others' is of process groups that are gone.
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
        found[name] = on_layout(models, case)
    if rank == 0:
        torch.save(found, out)


def on_layout(models: Path, case: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    config = MegatronConfig(**case["megatron_cfg"])
    comm = lay_out(config, seed=0)
    found = {}
    for model, batching in case["cases"]:
        keys = BATCHINGS[batching] | {"megatron_cfg": config, "max_total_sequence_length": LONGEST}
        actor = make_actor(models / model, comm, OPTIMIZER, **keys)
        members = share(comm, all_on_first=batching in ALL_ON_FIRST)
        found[model, batching] = trained(actor, comm, members, 0.05 if batching == MEAN_ENTROPY else 0.0)
    comm.barrier()
    comm.shutdown()
    return found


def trained(actor: MegatronActor, comm: DataParallel, members: range, mean_entropy: float) -> dict[str, Any]:
    """Updates of which this data-parallel rank has the sequences `members`.

    Loss and gradient norm of every step, log-probs and entropies after each, and the weights at the end."""
    steps = []
    for seed in range(STEPS):
        sequences = random_sequences(SEQUENCES, seed, max_response=LONGEST - 8)
        mine = [sequences[index] for index in members]
        update = actor.update(mine, Objective(), temperature=0.8, micro_batch_entropy_coeff=mean_entropy)
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
