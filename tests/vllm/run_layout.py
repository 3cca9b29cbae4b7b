"""Optimiser steps with a weight push after each, on a parallel layout; run by test_vllm_layouts.py under `launch`.

Arguments: model folder, policy.megatron_cfg as JSON, ranks that share one engine. Every process checks its engine.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from vllm_models import TOLERANCE, VOCAB, largest_difference, make_engine, requests, sampling, token_lists

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import ClusterConfig, MegatronConfig, PolicyConfig
from exgrpo_megatron.policy.distributed import initialize

UPDATES = 5


def main(folder: Path, layout: dict[str, Any], engine_ranks: int) -> None:
    from policy_models import make_actor, random_sequences

    config = MegatronConfig(**layout)
    comm = initialize(PolicyConfig(model_name="unused", megatron_cfg=config), ClusterConfig(), seed=0)
    actor = make_actor(folder, comm, megatron_cfg=config)
    engine = make_engine(folder, tensor_parallel_size=engine_ranks)
    asked = requests(seed=comm.rank)
    engine.load_weights(actor.export_weights(), actor.version)
    worst = compare(actor, engine, asked, comm)
    for step in range(UPDATES):
        sequences = random_sequences(6, seed=step, vocab=VOCAB)
        actor.update(sequences[comm.rank :: comm.size], Objective(), temperature=0.8)
        engine.load_weights(actor.export_weights(), actor.version)
    assert actor.version == UPDATES
    assert actor.weight_manifest() == {name: tuple(tensor.shape) for name, tensor in actor.export_weights()}
    worst = max(worst, compare(actor, engine, asked, comm))
    assert not comm.anywhere(worst >= TOLERANCE), worst
    engine.close()
    assert len(comm.all_gather(comm.rank)) == comm.size, "the trainer's groups outlive the engine"
    comm.barrier()
    comm.shutdown()


def compare(actor, engine, asked, comm) -> float:
    """Largest difference; members of a data-parallel rank ask the same and must get the same tokens."""
    answers = engine.sample(asked, sampling())
    first = comm.agreed(token_lists(answers))
    assert not comm.anywhere(first != token_lists(answers)), "engines with the same weights chose different tokens"
    return largest_difference(actor, asked, answers, 0.8)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
    # A forked rank ends without the destructors that remove vLLM's shared memory, and the next engine would find it.
    sys.stdout.flush()
    ctypes.CDLL(None).exit(0)
