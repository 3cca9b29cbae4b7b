"""The parts of the embedded engine: drawing tokens, planning waves, the cache, rotary frequencies."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CONFIGS, prompts
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from exgrpo_conversion.architecture import Architecture, Llama3RopeScaling
from exgrpo_megatron.rollout.decoder import rotary_inverse_frequencies
from exgrpo_megatron.rollout.kv_cache import KVCache
from exgrpo_megatron.rollout.protocol import SampleRequest
from exgrpo_megatron.rollout.sampling import choose_tokens, uniform_streams
from exgrpo_megatron.rollout.wave import plan_waves


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (1.0, 2)])
def test_a_uniform_picks_the_token_whose_share_of_the_unit_interval_it_lies_in(uniform: float, token: int) -> None:
    """Shares 0.1, 0.2, 0.7; 1.0 stands for a product that rounded up."""
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]])) + 3
    ids, logprobs = choose_tokens(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [token]
    assert logprobs.item() == pytest.approx(np.log([0.1, 0.2, 0.7][token]), abs=1e-6)


def test_a_temperature_divides_the_logits() -> None:
    """Shares 1:3 at temperature 0.5 become 1:9, so the boundary moves from 0.25 to 0.1."""
    logits = torch.log(torch.tensor([[1.0, 3.0]])).expand(2, 2)
    ids, logprobs = choose_tokens(logits, 0.5, torch.tensor([0.099, 0.101], dtype=torch.float64))
    assert ids.tolist() == [0, 1]
    np.testing.assert_allclose(logprobs, np.log([0.1, 0.9]), atol=1e-6)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (np.nextafter(1.0, 0.0), 3), (1.0, 3)])
def test_tokens_of_probability_0_are_never_drawn_at_either_end(uniform: float, token: int) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf, -200.0]])
    ids, _ = choose_tokens(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [token]


def test_greedy_takes_the_lowest_id_among_equal_logits_and_leaves_the_logits_unscaled() -> None:
    ids, logprobs = choose_tokens(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), 0.0, torch.zeros(1, dtype=torch.float64))
    assert ids.tolist() == [1]
    # -log(1 + 1 + e^-1 + e^-2) by hand
    assert logprobs.item() == pytest.approx(-np.log(2 + np.exp(-1) + np.exp(-2)), abs=1e-6)


def test_a_large_vocabulary_is_handled_in_parts_with_the_same_result() -> None:
    """20 rows of 2^18 logits are more than the 2^22 handled at once; one row alone is not."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(20, 2**18, generator=generator)
    uniforms = torch.rand(20, generator=generator, dtype=torch.float64)
    ids, logprobs = choose_tokens(logits, 1.0, uniforms)
    alone = [choose_tokens(logits[i : i + 1], 1.0, uniforms[i : i + 1]) for i in range(20)]
    assert ids.tolist() == [one.item() for one, _ in alone]
    expected = torch.log_softmax(logits.double(), -1).gather(1, ids[:, None]).squeeze(1)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    reached = cumulative.gather(1, ids[:, None]).squeeze(1)
    # float32 exponentials: shares are right to about 1e-7
    assert bool((reached > uniforms - 1e-6).all())


def test_uniform_streams_depend_on_their_own_seed_only_and_extend() -> None:
    streams = uniform_streams([3, 2**70, 3], 50)
    np.testing.assert_array_equal(streams[0], streams[2])
    np.testing.assert_array_equal(uniform_streams([2**70], 20)[0], streams[1, :20])
    # neighbouring seeds are uncorrelated: |r| of 20000 pairs stays under 4 / sqrt(20000) = 0.028
    many = uniform_streams(range(20001), 1)[:, 0]
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.028


def test_waves_hold_at_most_the_given_rows_and_group_like_lengths() -> None:
    requests = [SampleRequest(p, tuple(range(k))) for p, k in zip(prompts([2, 9, 5, 8]), [3, 4, 0, 2], strict=True)]
    waves = plan_waves(requests, 5)
    assert [[(index, part.seeds) for index, part in wave] for wave in waves] == [
        [(1, (0, 1, 2, 3)), (3, (0,))],
        [(3, (1,)), (0, (0, 1, 2))],
    ]


def test_the_cache_keeps_living_rows_when_it_shrinks_and_grows() -> None:
    """One layer, one head of size 1: the value of a cell is 10 * row + column."""
    cache = KVCache((1, 4, 1, 1), capacity=2, max_columns=5, dtype=torch.float32, device=torch.device("cpu"))
    rows = torch.arange(4.0)
    for column in range(2):
        cache.open_column()
        cache.append(0, (10 * rows + column).expand(2, -1)[..., None, None])
    cache.keep_rows(2, sources=torch.tensor([3]), targets=torch.tensor([0]))
    rows = torch.tensor([3.0, 1.0])
    for column in range(2, 5):
        cache.open_column()
        cached = cache.append(0, (10 * rows + column).expand(2, -1)[..., None, None])
    for half in cached:
        assert half.squeeze().tolist() == [[30, 31, 32, 33, 34], [10, 11, 12, 13, 14]]


@pytest.mark.parametrize("original", [64, 8192])
def test_scaled_rotary_frequencies_equal_those_of_transformers(original: int) -> None:
    """Original contexts of 64 and 8192 put frequencies of a 64-wide head on all three branches of the rule."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=rope)
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = Architecture.from_hf_config(CONFIGS["qwen2 tied, biases"]().to_dict())
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, original)
    arch = dataclasses.replace(plain, head_dim=64, rope_theta=10000.0, rope_scaling=scaling)
    assert attention_factor == 1.0
    np.testing.assert_allclose(rotary_inverse_frequencies(arch), expected, rtol=1e-6)
