"""Which stored answer of a drawn question is replayed: by the current policy (arXiv:2510.02245, 4.1), its tokens, or
its age."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.types import ScoredSequence, TokenIds


def needs_scoring(choice: AnswerChoice, num_answers: int) -> bool:
    """Whether the policy has to score the answers of a question before one is chosen."""
    return num_answers > 1 and choice.startswith("lowest_")


def needs_tokens(choice: AnswerChoice, num_answers: int) -> bool:
    """Whether the token ids of a question's answers must be known before one is chosen."""
    return num_answers > 1 and choice in ("shortest", "agreement")


def choose_answer(
    choice: AnswerChoice,
    scored: Sequence[ScoredSequence | None],
    rng: np.random.Generator,
    token_ids: Sequence[TokenIds] = (),
) -> int:
    """Index of the answer to replay; of equals the first.

    Args:
        scored: one entry a stored answer, oldest first, over its response tokens only; None where `needs_scoring` is
            false.
        rng: used by `random` alone, and only where there is a choice.
        token_ids: of each answer, where `needs_tokens` is true.

    Raises:
        ValueError: no answers, an answer that had to be scored was not, or a score that is not finite.
    """
    if not scored:
        raise ValueError("there is no stored answer to choose from")
    if len(scored) == 1:
        return 0
    match choice:
        case "random":
            return int(rng.integers(len(scored)))
        case "newest":
            return len(scored) - 1
        case "shortest":
            return int(np.argmin([len(tokens) for tokens in _known(token_ids, scored, choice)]))
        case "agreement":
            return int(np.argmax(mean_agreement(_known(token_ids, scored, choice))))
    return _lowest(choice, scored)


def mean_agreement(token_ids: Sequence[TokenIds]) -> NDArray[np.float64]:
    """Of each of several answers the mean likeness to the others, from 0 to 1: pairs of neighbouring tokens that two
    have in common, of all that either has. An answer of one token has none, and is like nothing."""
    pairs = [set(zip(tokens.tolist(), tokens[1:].tolist(), strict=False)) for tokens in token_ids]
    alike = np.zeros((len(pairs), len(pairs)))
    for i, first in enumerate(pairs):
        for j, second in enumerate(pairs[:i]):
            alike[i, j] = alike[j, i] = len(first & second) / max(len(first | second), 1)
    return alike.sum(axis=1) / (len(pairs) - 1)


def within(entropies: NDArray[np.float32], limit: float) -> list[int]:
    """Indices of the answers of at most this entropy, or else of the lowest."""
    found = np.flatnonzero(entropies <= np.float32(limit)).tolist()
    return found or [int(np.argmin(entropies))]


def _known(token_ids: Sequence[TokenIds], scored: Sequence[object], choice: AnswerChoice) -> Sequence[TokenIds]:
    if len(token_ids) != len(scored):
        raise ValueError(
            f"{choice} needs the token ids of {len(scored)} stored answers, found those of {len(token_ids)}"
        )
    return token_ids


def _lowest(choice: AnswerChoice, scored: Sequence[ScoredSequence | None]) -> int:
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
