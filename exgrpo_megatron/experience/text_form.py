"""Replay from text as the released code does it (`experience.stored_answer: text`), its defects included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from exgrpo_megatron.types import StoredAnswer, TokenIds


def as_text_answer(
    answer: StoredAnswer,
    tokenizer_decode: Callable[[list[int]], str],
    tokenizer_encode: Callable[[str], Sequence[int]],
    eos_text: str,
    eos_id: int,
) -> tuple[StoredAnswer, int]:
    """The answer after a trip through text, and how many of its log-probs are invented.

    The text loses every trailing character that occurs anywhere in `eos_text` (a set of characters, not a suffix),
    is tokenised anew and gets an EOS. The recorded log-probs are cut, or filled up with 0 (probability 1), to the new
    length, whether or not they still belong to the tokens they stand beside.

    Args:
        tokenizer_decode: token ids to text, special tokens kept.
        tokenizer_encode: text to token ids, no special tokens added.
    """
    token_ids = as_text_tokens(answer.token_ids, tokenizer_decode, tokenizer_encode, eos_text, eos_id)
    invented = max(0, len(token_ids) - len(answer.logprobs))
    logprobs = np.pad(answer.logprobs[: len(token_ids)], (0, invented))
    return replace(answer, token_ids=token_ids, logprobs=logprobs), invented


def as_text_tokens(
    token_ids: TokenIds,
    tokenizer_decode: Callable[[list[int]], str],
    tokenizer_encode: Callable[[str], Sequence[int]],
    eos_text: str,
    eos_id: int,
) -> TokenIds:
    """The token ids alone, after the same trip."""
    text = tokenizer_decode(token_ids.tolist()).rstrip(eos_text)
    return np.array([*tokenizer_encode(text), eos_id], dtype=np.int32)
