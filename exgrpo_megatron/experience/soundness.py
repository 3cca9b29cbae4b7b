"""Whether an answer can be stored: it is asked of every correct one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exgrpo_megatron.types import Logprobs, TokenIds, Trajectory


def all_sound(answers: Sequence[Trajectory]) -> bool:
    """Whether `answer_fault` has nothing against any of them; much sooner than one by one."""
    lengths = [len(answer.token_ids) for answer in answers]
    if not all(lengths) or lengths != [len(answer.logprobs) for answer in answers]:
        return False
    ids, logprobs = [answer.token_ids for answer in answers], [answer.logprobs for answer in answers]
    return not answers or bool(np.concatenate(ids).min() >= 0 and np.isfinite(np.concatenate(logprobs)).all())


def answer_fault(token_ids: TokenIds, logprobs: Logprobs) -> str | None:
    """Why an answer may not be stored, or None: it needs tokens, and exactly one finite log-prob for each."""
    if not len(token_ids):
        return "it has no tokens"
    if token_ids.min() < 0:
        return f"it has token id {token_ids.min()}"
    if len(logprobs) != len(token_ids):
        return f"it has {len(logprobs)} log-probs for {len(token_ids)} tokens"
    finite = np.isfinite(logprobs)
    if not finite.all():
        first = int(np.argmin(finite))
        return f"log-prob {first} of {len(logprobs)} is {logprobs[first]}"
    return None
