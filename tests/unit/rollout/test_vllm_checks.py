"""What a recipe with `policy.generation.backend: vllm` must fulfil, found before any weight is loaded."""

from dataclasses import replace

import pytest
from tiny_models import CONFIGS

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.rollout import vllm_checks
from exgrpo_megatron.rollout.vllm_checks import check_vllm


def recipe(generation=None, megatron=None, **sections):
    return parse_recipe(
        {
            "data": {"train": {"generator": "chain_arithmetic"}, "max_input_seq_length": 32},
            "policy": {
                "model_name": "unused",
                "max_total_sequence_length": 128,
                "megatron_cfg": megatron or {},
                "generation": {"backend": "vllm", "max_new_tokens": 96, **(generation or {})},
            },
            **sections,
        }
    )


ARCH = replace(Architecture.from_hf_config(CONFIGS["llama untied, all heads their own"]().to_dict()), head_dim=32)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(vllm_checks, "is_installed", lambda: True)


def refusal(config, arch=ARCH, world_size=1, data_parallel_size=1):
    with pytest.raises(ConfigError) as error:
        check_vllm(config, arch, world_size=world_size, data_parallel_size=data_parallel_size)
    return str(error.value)


def test_a_recipe_that_fits_is_admitted():
    check_vllm(recipe(), ARCH, world_size=1, data_parallel_size=1)
    two = recipe({"vllm_cfg": {"tensor_parallel_size": 2}}, {"tensor_model_parallel_size": 2})
    check_vllm(two, ARCH, world_size=4, data_parallel_size=2)
    pipeline = recipe({"vllm_cfg": {"tensor_parallel_size": 2}}, {"pipeline_model_parallel_size": 2})
    check_vllm(pipeline, ARCH, world_size=2, data_parallel_size=1)


def test_without_vllm_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(vllm_checks, "is_installed", lambda: False)
    message = refusal(recipe())
    assert "vLLM is not installed" in message
    assert "make setup-vllm" in message


def test_head_sizes_that_vllm_cannot_do_are_refused():
    assert "24 dimensions" in refusal(recipe(), replace(ARCH, head_dim=24))


def test_ranks_of_an_engine_must_be_of_one_data_parallel_rank():
    config = recipe({"vllm_cfg": {"tensor_parallel_size": 2}})
    assert "tensor_parallel_size = 2 must divide" in refusal(config, world_size=2, data_parallel_size=2)
    three = recipe({"vllm_cfg": {"tensor_parallel_size": 3}})
    assert "does not divide the model's num_attention_heads = 4" in refusal(three, world_size=3)


def test_a_cache_must_hold_one_answer():
    # 2 (key, value) x 2 layers x 4 heads x 32 x 4 bytes = 2048 bytes a token, 128 tokens.
    config = recipe({"vllm_cfg": {"kv_cache_memory_bytes": 2048 * 100}})
    message = refusal(config)
    assert "holds 100 tokens" in message
    assert str(2048 * 128) in message
    check_vllm(recipe({"vllm_cfg": {"kv_cache_memory_bytes": 2048 * 128}}), ARCH, world_size=1, data_parallel_size=1)


def test_positions_beyond_the_models_are_refused():
    config = recipe({"vllm_cfg": {"max_model_len": 512}})
    assert "max_model_len = 512 is more than the 256" in refusal(config, replace(ARCH, max_positions=256))


@pytest.mark.parametrize(
    ("generation", "sections", "words"),
    [
        (
            {"vllm_cfg": {"max_model_len": 127}},
            {},
            "32 + 96 is more than policy.generation.vllm_cfg.max_model_len = 127",
        ),
        ({"temperature": 0.005}, {}, "policy.generation.temperature = 0.005"),
        ({}, {"eval": {"temperature": 0.005}}, "eval.temperature = 0.005"),
        ({"vllm_cfg": {"separate_process": True, "tensor_parallel_size": 2}}, {}, "separate_process = true"),
        ({"top_p": 0.9}, {}, "recorded log-probs need the whole distribution"),
        ({"top_k": 40}, {}, "recorded log-probs need the whole distribution"),
    ],
)
def test_conflicting_keys_are_refused_with_their_values(generation, sections, words):
    with pytest.raises(ConfigError) as error:
        recipe(generation, **sections)
    assert words in str(error.value)
