"""Which stored answer of a drawn question is replayed, judged by the current policy (arXiv:2510.02245, 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.types import ScoredSequence


def needs_scoring(choice: AnswerChoice, num_answers: int) -> bool:
    """Whether the policy has to score the answers of a question before one is chosen."""
    return num_answers > 1 and choice != "random"


def choose_answer(choice: AnswerChoice, scored: Sequence[ScoredSequence | None], rng: np.random.Generator) -> int:
    """Index of the answer to replay; of equals the first.

    Args:
        scored: one entry a stored answer, over its response tokens only; None where `needs_scoring` is false.
        rng: used by `random` alone, and only where there is a choice.

    Raises:
        ValueError: no answers, an answer that had to be scored was not, or a score that is not finite.
    """
    if not scored:
        raise ValueError("there is no stored answer to choose from")
    if len(scored) == 1:
        return 0
    if choice == "random":
        return int(rng.integers(len(scored)))
    scores = np.array([_score(choice, sequence) for sequence in scored])
    if not np.isfinite(scores).all():
        raise ValueError(f"scores of stored answers must be finite, found {scores.tolist()} ({choice})")
    return int(np.argmin(scores))


def _score(choice: AnswerChoice, sequence: ScoredSequence | None) -> float:
    """The lower, the better; in float64, so that a long answer's sum does not lose its last tokens."""
    if sequence is None:
        raise ValueError(f"{choice} needs every stored answer scored under the current policy")
    match choice:
        case "lowest_mean_entropy":
            return float(np.mean(sequence.entropies, dtype=np.float64))
        case "lowest_total_entropy":
            return float(np.sum(sequence.entropies, dtype=np.float64))
        case "lowest_perplexity":
            # Its logarithm: the same order, and no overflow.
            return -float(np.mean(sequence.logprobs, dtype=np.float64))
    raise AssertionError(f"{choice} has no score")
