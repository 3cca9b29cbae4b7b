"""Which layers a pipeline stage gets, and what a model refuses."""

from dataclasses import replace

import pytest

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.layout import check_layout, stage_layers

QWEN2_7B = Architecture.from_hf_config(
    {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
)


def layout(**keys) -> MegatronConfig:
    return MegatronConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [28]),
        ({"pipeline_model_parallel_size": 4}, [7, 7, 7, 7]),
        ({"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 4}, [8, 8, 8, 4]),
        (
            {
                "pipeline_model_parallel_size": 4,
                "num_layers_in_first_pipeline_stage": 6,
                "num_layers_in_last_pipeline_stage": 4,
            },
            [6, 9, 9, 4],
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 16,
                "num_layers_in_last_pipeline_stage": 12,
            },
            [16, 12],
        ),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 7}, [14, 14]),
    ],
)
def test_layers_are_shared_out_among_stages(keys, expected):
    assert stage_layers(28, layout(**keys)) == expected


def test_chunks_that_do_not_divide_a_stage_are_refused_with_the_stage():
    uneven = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 16}
    with pytest.raises(
        ConfigError, match=r"virtual_pipeline_model_parallel_size = 8 does not divide the 12 layers of pipeline stage 1"
    ):
        stage_layers(28, layout(**uneven, virtual_pipeline_model_parallel_size=8))


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"tensor_model_parallel_size": 3}, ["tensor_model_parallel_size = 3", "num_attention_heads = 28"]),
        ({"tensor_model_parallel_size": 7}, ["tensor_model_parallel_size = 7", "num_key_value_heads = 4"]),
        ({"pipeline_model_parallel_size": 3}, ["pipeline_model_parallel_size = 3", "28 layers"]),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 5},
            ["num_layers_in_first_pipeline_stage = 5", "leave 23 for the other 3"],
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_in_first_pipeline_stage": 16,
                "num_layers_in_last_pipeline_stage": 16,
            },
            ["num_layers_in_last_pipeline_stage = 16", "leave -4 for the other 0"],
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_with_key_and_numbers(keys, parts):
    with pytest.raises(ConfigError) as caught:
        check_layout(QWEN2_7B, layout(**keys))
    assert all(part in str(caught.value) for part in parts)


def test_an_mlp_that_tensor_parallel_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="intermediate_size = 18945"):
        check_layout(replace(QWEN2_7B, ffn_size=18945), layout(tensor_model_parallel_size=2))
