"""The loss of a kept optimiser step from its per-token numbers, by the definition of the objective."""

from __future__ import annotations

import numpy as np
import torch

from exgrpo_kernels.reference import token_terms
from exgrpo_megatron.debug.files import KeptUpdate


def loss_of(update: KeptUpdate) -> float | None:
    """In float64, from log-ratios and entropies as the run had them; None where it raised on a rank or the sequences of
    one are missing, or where the loss depends on micro-batches too (loss_fn.entropy_bonus: per_micro_batch)."""
    unknown = update.loss is None or not update.whole or len(update.log_ratio) != len(update.sequences)
    if unknown or update.micro_batch_entropy_coeff != 0:
        return None
    total = 0.0
    for sequence, log_ratio, entropy in zip(update.sequences, update.log_ratio, update.entropy, strict=True):
        old = torch.from_numpy(sequence.old_logprobs.astype(np.float64))
        terms = token_terms(
            old + torch.from_numpy(log_ratio.astype(np.float64)),
            old,
            torch.full_like(old, sequence.advantage),
            torch.full(old.shape, sequence.replayed),
            update.objective,
        )
        weights = np.ones(len(old)) if sequence.token_weights is None else sequence.token_weights.astype(np.float64)
        policy = float((terms.policy_loss * torch.from_numpy(weights)).sum()) * sequence.policy_weight
        total += policy - sequence.entropy_weight * float(entropy.astype(np.float64).sum())
    return total
