"""Time of one optimiser step on padded, dynamic and packed micro-batches, on one process.

    OMP_NUM_THREADS=1 python benchmarks/packing.py

256 sequences of 20 to 200 tokens (uniform, prompt a quarter), a Qwen2 model of 2 layers and 128 hidden units (0.6M
parameters), float32. All may hold as many positions as `number` sequences of the longest need. The actor sorts by
length in every case, so that micro-batches by number have little padding where they are small. On two cores shared with
other work, with torch 2.13.0 and megatron-core 0.16.1:

     8 x 200   number:   2.1% padding, best 1.81 s of CPU time, 1.00 of `number`
     8 x 200  dynamic:   4.4% padding, best 1.75 s of CPU time, 0.97 of `number`
     8 x 200   packed:   0.0% padding, best 1.75 s of CPU time, 0.97 of `number`
    64 x 200   number:  16.4% padding, best 2.09 s of CPU time, 1.00 of `number`
    64 x 200  dynamic:  22.3% padding, best 2.23 s of CPU time, 1.07 of `number`
    64 x 200   packed:   0.0% padding, best 1.94 s of CPU time, 0.93 of `number`
"""

from __future__ import annotations

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
VOCAB = 1024
NUMBERS = (8, 64)
REPEATS = 3


def main() -> None:
    comm = initialize(PolicyConfig(model_name="unused"), ClusterConfig(), seed=0)
    sequences = random_sequences()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for number in NUMBERS:
            actors = {
                name: MegatronActor(
                    Path(folder),
                    PolicyConfig(model_name=folder, max_total_sequence_length=LENGTHS[1], **keys),
                    OptimizerConfig(),
                    SchedulerConfig(),
                    total_updates=100,
                    comm=comm,
                )
                for name, keys in batchings(number).items()
            }
            compare(number, actors, sequences)
    comm.shutdown()


def batchings(number: int) -> dict[str, dict[str, Any]]:
    budget = number * LENGTHS[1]
    by_tokens = {"enabled": True, "train_mb_tokens": budget, "logprob_mb_tokens": budget}
    return {
        "number": {"train_micro_batch_size": number},
        "dynamic": {"dynamic_batching": by_tokens},
        "packed": {"sequence_packing": by_tokens},
    }


def compare(number: int, actors: dict[str, MegatronActor], sequences: list[TrainSequence]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    padding = {}
    for repeat in range(REPEATS + 1):
        for name, actor in actors.items():  # in turns, so that what else the machine does meets all alike
            start = time.process_time()
            result = actor.update(sequences, Objective(), temperature=1.0)
            padding[name] = result.num_padding / result.num_positions
            if repeat:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    base = min(seconds["number"])
    for name, measured in seconds.items():
        print(
            f"{number:>2} x {LENGTHS[1]} {name:>8}: {padding[name]:6.1%} padding, "
            f"best {min(measured):.2f} s of CPU time, {min(measured) / base:.2f} of `number`"
        )


def save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
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
