"""What is read from config.json, and what is refused by key and value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from exgrpo_conversion.architecture import Architecture, Llama3RopeScaling, UnsupportedModelError

LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A complete config.json of transformers 4 with some keys changed."""
    return {
        "model_type": model_type,
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        **changes,
    }


def without(key: str, **kwargs: Any) -> dict[str, Any]:
    return {name: value for name, value in config(**kwargs).items() if name != key}


def test_a_qwen25_config_is_read_key_by_key():
    # The numbers of the published Qwen2.5-1.5B config.json.
    published = config(
        "qwen2",
        architectures=["Qwen2ForCausalLM"],
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        sliding_window=131072,
        attention_dropout=0.0,
    )
    assert Architecture.from_hf_config(published) == Architecture(
        family="qwen2",
        num_layers=28,
        hidden_size=1536,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        ffn_size=8960,
        vocab_size=151936,
        tied=True,
        qkv_bias=True,
        qk_norm=False,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_positions=131072,
    )


@pytest.mark.parametrize(
    ("model_type", "family", "qkv_bias", "qk_norm"),
    [
        ("qwen2", "qwen2", True, False),
        ("qwen3", "qwen3", False, True),
        ("llama", "llama", False, False),
        ("mistral", "mistral", False, False),
    ],
)
def test_the_model_type_decides_biases_and_norms(model_type: str, family: str, qkv_bias: bool, qk_norm: bool):
    arch = Architecture.from_hf_config(config(model_type, sliding_window=None))
    assert (arch.family, arch.qkv_bias, arch.qk_norm) == (family, qkv_bias, qk_norm)


def test_rope_parameters_of_transformers_5_say_the_same_as_the_keys_of_transformers_4():
    old = config(rope_theta=500000.0, rope_scaling=LLAMA_31_ROPE)
    new = without("rope_theta") | {"rope_parameters": {"rope_theta": 500000.0, **LLAMA_31_ROPE}}
    arch = Architecture.from_hf_config(old)
    assert arch == Architecture.from_hf_config(new)
    assert arch.rope_theta == 500000.0
    assert arch.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_a_config_saved_by_transformers_is_read_as_transformers_means_it(config_class: type, tied: bool, tmp_path):
    made = config_class(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=tied, rms_norm_eps=1e-5
    )
    made.save_pretrained(tmp_path)
    arch = Architecture.from_hf_config(json.loads((tmp_path / "config.json").read_text()))
    assert (arch.tied, arch.num_heads, arch.num_kv_heads, arch.norm_eps) == (tied, 6, 2, 1e-5)
    assert arch.head_dim == (128 if config_class is Qwen3Config else 8)  # Qwen3 has 128 unless told otherwise
    assert arch.rope_theta == made.rope_parameters["rope_theta"]
    assert (arch.vocab_size, arch.ffn_size) == (made.vocab_size, made.intermediate_size)


def test_a_llama_without_key_value_heads_has_one_for_every_query_head():
    assert Architecture.from_hf_config(without("num_key_value_heads")).num_kv_heads == 6


def test_an_explicit_head_dim_need_not_be_hidden_size_over_heads():
    assert Architecture.from_hf_config(config("qwen3", head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("model_type", config("gemma2")),
        ("model_type", without("model_type")),
        ("architectures", config(architectures=["LlamaForSequenceClassification"])),
        ("hidden_act", config(hidden_act="gelu")),
        ("attention_dropout", config(attention_dropout=0.1)),
        ("attention_bias", config(attention_bias=True)),
        ("attention_bias", config("qwen3", attention_bias=True)),
        ("mlp_bias", config(mlp_bias=True)),
        ("use_sliding_window", config("qwen2", use_sliding_window=True)),
        ("layer_types", config("qwen2", layer_types=["full_attention", "sliding_attention"])),
        ("sliding_window", config("mistral", sliding_window=4096)),
        ("sliding_window", config("mistral")),  # absent means 4096 in transformers
        ("quantization_config", config(quantization_config={"quant_method": "gptq"})),
        ("partial_rotary_factor", config(partial_rotary_factor=0.5)),
        ("num_key_value_heads", config(num_key_value_heads=4)),
        ("num_key_value_heads", config(num_key_value_heads=0)),
        ("num_attention_heads", config(num_attention_heads=7, num_key_value_heads=7)),
        ("head_dim", config(head_dim=7)),
        ("hidden_size", without("hidden_size")),
        ("vocab_size", config(vocab_size="100")),
        ("rms_norm_eps", config(rms_norm_eps=0)),
        ("rope_theta", config(rope_theta=-1.0)),
        ("tie_word_embeddings", config(tie_word_embeddings="yes")),
        ("rope_type", config(rope_scaling={"type": "linear", "factor": 2.0})),
        ("rope_type", config(rope_scaling={"rope_type": "yarn", "factor": 4.0})),
        ("rope_parameters", config(rope_parameters={"full_attention": {"rope_theta": 1.0, "rope_type": "default"}})),
        ("partial_rotary_factor", config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25})),
        ("llama3 low_freq_factor", config(rope_scaling=LLAMA_31_ROPE | {"low_freq_factor": 2.0})),
        ("llama3 high_freq_factor", config(rope_scaling=LLAMA_31_ROPE | {"high_freq_factor": 8.0})),
        (
            "llama3 original_max_position_embeddings",
            config(rope_scaling=LLAMA_31_ROPE | {"original_max_position_embeddings": 4096}),
        ),
        ("llama3 factor", config(rope_scaling=LLAMA_31_ROPE | {"factor": None})),
    ],
)
def test_what_is_not_mapped_is_refused_by_key_and_value(key: str, refused: dict[str, Any]):
    with pytest.raises(UnsupportedModelError) as caught:
        Architecture.from_hf_config(refused)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key} = {caught.value.value!r} is not supported: ")
