"""Replayed tokens whose ratio has become too large lose their gradient, while a guard holds the run to a clip."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.parts import Parts, score_shared
from exgrpo_megatron.types import ScoredSequence, TrainSequence


def capped(parts: Parts, sequences: list[TrainSequence], cap: float | None) -> tuple[list[TrainSequence], int]:
    """The sequences of an optimiser step, with weight 0 for replayed tokens whose w is above `cap` under the policy as
    it is now, and how many these are; None: no cap. Collective, with the same sequences on every process.

    That is the gradient of min(w, cap), whatever the shaping; the entropy bonus stays.
    """
    if cap is None:
        return sequences, 0
    replayed = [i for i, sequence in enumerate(sequences) if sequence.replayed]
    scores = score_shared(parts, [(sequences[i].prompt_ids, sequences[i].response_ids) for i in replayed])
    result, count = list(sequences), 0
    for i, scored in zip(replayed, scores, strict=True):
        beyond = _beyond(sequences[i], scored, cap)
        count += int(beyond.sum())
        weights = sequences[i].token_weights
        kept = np.where(beyond, np.float32(0), np.float32(1) if weights is None else weights)
        result[i] = replace(sequences[i], token_weights=kept.astype(np.float32))
    return result, count


def _beyond(sequence: TrainSequence, scored: ScoredSequence, cap: float) -> NDArray[np.bool_]:
    log_ratio = scored.logprobs.astype(np.float64) - sequence.old_logprobs
    # Not "above": a ratio that is no number has no gradient either.
    return ~(log_ratio <= np.log(cap))
