"""The soft penalty of answers that come near the longest length (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from exgrpo_megatron.config import Config


def length_penalty(num_tokens: int, config: Config) -> float:
    """What is taken off the reward of an answer of so many tokens, from 0 to `overlong_buffer_penalty`.

    It grows linearly over the last `overlong_buffer_length` tokens before `max_response_length`. Only the advantage is
    made from what is left: whether an answer counts as correct does not depend on it.
    """
    shaping = config.grpo.reward_shaping
    if not shaping.enabled:
        return 0.0
    assert shaping.overlong_buffer_length is not None
    assert shaping.overlong_buffer_penalty is not None
    beyond = num_tokens - (config.penalised_at - shaping.overlong_buffer_length)
    return shaping.overlong_buffer_penalty * min(max(beyond / shaping.overlong_buffer_length, 0.0), 1.0)
