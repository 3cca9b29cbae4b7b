"""Supervised fine-tuning through the same actor: the warm start, and a baseline of the paper."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.algorithm.batch import balanced_shares
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.data.sft import SFTBatches
from exgrpo_megatron.parts import Policy
from exgrpo_megatron.types import TokenIds, TrainSequence


class SFTTrainer:
    """Minimises the mean negative log-likelihood of the response tokens of each batch."""

    def __init__(self, policy: Policy, batches: SFTBatches, comm: Communicator, max_num_steps: int) -> None:
        self.policy, self.batches, self.comm = policy, batches, comm
        self.max_num_steps = max_num_steps
        self.last_step = 0

    def fit(self, after_step: Callable[[int, dict[str, float]], bool]) -> None:
        """All remaining steps; stops early where `after_step(step, metrics)` answers False."""
        while self.last_step < self.max_num_steps:
            metrics = self.step()
            if not after_step(self.last_step, metrics):
                return

    def step(self) -> dict[str, float]:
        """One optimiser step on the batch of this step number; each rank trains a token-balanced share."""
        sequences = supervised_sequences(self.batches.batch(self.last_step))
        share = balanced_shares([sequence.num_tokens for sequence in sequences], self.comm.size)[self.comm.rank]
        self.last_step += 1
        with self.comm.places.inside(f"supervised step {self.last_step}"):
            result = self.policy.update([sequences[i] for i in share], Objective(kind="nll"), temperature=1.0)
        return {
            "sft/loss": result.loss,
            "sft/learning_rate": result.learning_rate,
            "sft/grad_norm": result.grad_norm,
            "sft/skipped_updates": int(result.skipped),
        }


def supervised_sequences(batch: list[tuple[TokenIds, TokenIds]]) -> list[TrainSequence]:
    """(prompt, response) pairs whose summed loss is the mean over all response tokens of the batch."""
    weight = 1.0 / sum(len(response) for _, response in batch)
    return [
        TrainSequence(
            prompt_ids=prompt,
            response_ids=response,
            old_logprobs=np.zeros(len(response), dtype=np.float32),
            advantage=1.0,
            replayed=False,
            policy_weight=weight,
            entropy_weight=0.0,
        )
        for prompt, response in batch
    ]
