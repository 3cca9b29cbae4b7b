"""The released code's trip through text: the defects it brings, on its own examples."""

from __future__ import annotations

import numpy as np
import pytest

from exgrpo_megatron.experience.text_form import as_text_answer
from exgrpo_megatron.types import StoredAnswer

EOS_TEXT, EOS_ID = "<|endoftext|>", 0


def decode(ids: list[int]) -> str:
    """A tokenizer of characters."""
    return "".join(EOS_TEXT if i == EOS_ID else chr(i) for i in ids)


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def answer(text: str, eos: bool = True) -> StoredAnswer:
    ids = np.array(encode(text) + [EOS_ID] * eos, dtype=np.int32)
    return StoredAnswer(ids, -np.arange(1, len(ids) + 1, dtype=np.float32), policy_version=3, step=9)


@pytest.mark.parametrize(
    ("text", "remains"),
    [
        ("</answer>", "</answer"),
        ("The answer is ten", "The answer is "),
        ("therefore the end", "therefore the "),
        ("it is 7", "it is 7"),
    ],
)
def test_the_end_loses_every_character_that_occurs_in_the_eos_text(text: str, remains: str):
    changed, invented = as_text_answer(answer(text), decode, encode, EOS_TEXT, EOS_ID)
    assert changed.token_ids.tolist() == [*encode(remains), EOS_ID]
    assert changed.logprobs.tolist() == [-1.0 * i for i in range(1, len(remains) + 2)]
    assert (changed.policy_version, changed.step, invented) == (3, 9, 0)


def test_a_truncated_answer_gets_an_eos_of_invented_probability_one():
    changed, invented = as_text_answer(answer("it is 7", eos=False), decode, encode, EOS_TEXT, EOS_ID)
    assert changed.token_ids.tolist() == [*encode("it is 7"), EOS_ID]
    assert changed.logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7, 0]
    assert invented == 1


def test_a_longer_tokenisation_invents_a_log_prob_for_each_token_more():
    """The policy wrote 12 as one token (id 500); the tokenizer makes two of it, so later log-probs shift."""
    merged = StoredAnswer(np.array([500, ord("!"), EOS_ID], dtype=np.int32), np.array([-1, -2, -3], np.float32), 0, 0)
    changed, invented = as_text_answer(
        merged, lambda ids: decode([49, 50, *ids[1:]] if ids[0] == 500 else ids), encode, EOS_TEXT, EOS_ID
    )
    assert changed.token_ids.tolist() == [*encode("12!"), EOS_ID]
    assert changed.logprobs.tolist() == [-1, -2, -3, 0]
    assert changed.logprobs.dtype == np.float32
    assert invented == 1
