"""Time of one optimiser step on padded, dynamic and packed micro-batches, on one process.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

256 sequences of 20 to 200 tokens (uniform, prompt a quarter), a Qwen2 model of 4 layers and 256 hidden units (4.2M
parameters), float32. `number` has micro-batches of 8 sequences; the others have 1600 positions, as many as 8 of the
longest need. The actor sorts by length in every case, so that even micro-batches by number have little padding.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import ClusterConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.types import TrainSequence

SEQUENCES = 256
LENGTHS = (20, 200)
VOCAB = 4096
BUDGET = 8 * LENGTHS[1]
REPEATS = 5
BY_TOKENS = {"enabled": True, "train_mb_tokens": BUDGET, "logprob_mb_tokens": BUDGET}
BATCHINGS: dict[str, dict[str, Any]] = {
    "number": {"train_micro_batch_size": 8},
    "dynamic": {"dynamic_batching": BY_TOKENS},
    "packed": {"sequence_packing": BY_TOKENS},
}


def main() -> None:
    comm = initialize(PolicyConfig(model_name="unused"), ClusterConfig(), seed=0)
    sequences = random_sequences()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        actors = {
            name: MegatronActor(
                Path(folder),
                PolicyConfig(model_name=folder, max_total_sequence_length=LENGTHS[1], **keys),
                OptimizerConfig(),
                SchedulerConfig(),
                total_updates=100,
                comm=comm,
            )
            for name, keys in BATCHINGS.items()
        }
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for repeat in range(REPEATS + 1):
        for name, actor in actors.items():  # in turns, so that what else the machine does meets all alike
            start = time.process_time()
            result = actor.update(sequences, Objective(), temperature=1.0)
            if repeat:  # the first one warms up
                seconds[name].append(time.process_time() - start)
            else:
                print(f"{name:>8}: {result.num_padding / result.num_positions:6.1%} padding")
    for name, measured in seconds.items():
        ratio = statistics.median(measured) / statistics.median(seconds["number"])
        print(f"{name:>8}: median {statistics.median(measured):.2f} s of CPU time, {ratio:.2f} of `number`")
    comm.shutdown()


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def random_sequences() -> list[TrainSequence]:
    generator = np.random.default_rng(0)
    sequences = []
    for length in generator.integers(LENGTHS[0], LENGTHS[1], SEQUENCES, endpoint=True):
        tokens = generator.integers(0, VOCAB, length, dtype=np.int32)
        prompt, response = np.split(tokens, [length // 4])
        sequences.append(
            TrainSequence(
                prompt_ids=prompt,
                response_ids=response,
                old_logprobs=np.full(len(response), -np.log(VOCAB), np.float32),
                advantage=float(generator.normal()),
                replayed=False,
                policy_weight=1e-4,
                entropy_weight=1e-6,
            )
        )
    return sequences


if __name__ == "__main__":
    main()
