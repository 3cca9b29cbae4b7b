"""What is read from config.json, and what is refused by key and value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig, LlamaConfig, Qwen2Config, Qwen3Config

from exgrpo_conversion import config_keys
from exgrpo_conversion.architecture import Architecture, Llama3RopeScaling, UnsupportedModelError
from exgrpo_conversion.families import FAMILIES

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
        ("rope_theta", config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"})),  # beside 500000
        ("rope_theta", config(rope_theta=[1e4])),
        ("rope_scaling", config(rope_scaling=LLAMA_31_ROPE, rope_parameters=LLAMA_31_ROPE | {"factor": 32.0})),
        ("rope_scaling.factor", config(rope_scaling={"rope_type": "default", "factor": 8.0})),
        ("rope_scaling.mrope_section", config(rope_scaling={"type": "default", "mrope_section": [8, 12, 12]})),
        ("rope_type", config(rope_scaling={"type": ["llama3"]})),
        ("layer_types", config(layer_types="full_attention")),
        ("architectures", config(architectures="LlamaForCausalLM")),
        ("rope_interleaved", config(rope_interleaved=True)),
        ("use_mrope", config("qwen2", use_mrope=True)),
        ("use_sliding_window", config("qwen3", use_sliding_window=True)),
        ("pruned_heads", config(pruned_heads={"0": [1]})),
        ("auto_map", config(auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})),
        ("is_encoder_decoder", config(is_encoder_decoder=True)),
        # Keys of other families, or of none, of which nothing is known here.
        ("use_mrope", config("llama", use_mrope=False)),
        ("sliding_window", config("llama", sliding_window=4096)),
        ("logit_scale", config(logit_scale=0.0625)),
        ("embedding_multiplier", config(embedding_multiplier=12)),
        ("num_experts", config("qwen3", num_experts=128)),
        ("final_logit_softcapping", config(final_logit_softcapping=30.0)),
        ("no_rope_layers", config(no_rope_layers=[1, 1, 0])),
        ("per_layer_config", config(per_layer_config={"0": {"hidden_size": 8}})),
    ],
)
def test_what_is_not_mapped_is_refused_by_key_and_value(key: str, refused: dict[str, Any]):
    with pytest.raises(UnsupportedModelError) as caught:
        Architecture.from_hf_config(refused)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key} = {caught.value.value!r} is not supported: ")


def test_unknown_keys_that_are_null_say_nothing():
    assert Architecture.from_hf_config(config(logit_scale=None, auto_map=None)) == Architecture.from_hf_config(config())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_that_transformers_has_for_a_family_is_mapped_bound_or_known_to_change_nothing(model_type: str):
    keys = set(AutoConfig.for_model(model_type).to_dict()) | {"torch_dtype", "rope_scaling", "rope_theta"}
    keys |= set(GenerationConfig._get_default_generation_params())  # older versions wrote these too
    family = FAMILIES[model_type]
    known = config_keys.READ | config_keys.ONLY.keys() | config_keys.HARMLESS.keys()
    assert keys - known - family.only.keys() - family.harmless.keys() == set()


def test_no_key_has_two_meanings():
    assert not config_keys.READ & config_keys.ONLY.keys()
    assert not config_keys.READ & config_keys.HARMLESS.keys()
    assert not config_keys.ONLY.keys() & config_keys.HARMLESS.keys()
    for family in FAMILIES.values():
        assert not family.only.keys() & family.harmless.keys()


def test_null_key_value_heads_are_as_many_as_query_heads_also_where_absent_ones_are_not():
    """As in transformers: Qwen2Config has 32 of them, and takes null for num_attention_heads."""
    assert Architecture.from_hf_config(config("qwen2", num_key_value_heads=None)).num_kv_heads == 6
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads = 32"):
        Architecture.from_hf_config(without("num_key_value_heads", model_type="qwen2"))


PUBLISHED = {
    "Qwen2.5-Math-1.5B": config(
        "qwen2", architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151643,
        initializer_range=0.02, max_window_layers=21, sliding_window=4096, tie_word_embeddings=True,
        torch_dtype="bfloat16", transformers_version="4.44.0", use_cache=True, use_mrope=False,
        use_sliding_window=False,
    ),
    "Qwen3-8B": config(
        "qwen3", architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, head_dim=128,
        bos_token_id=151643, eos_token_id=151645, initializer_range=0.02, max_window_layers=36, rope_scaling=None,
        sliding_window=None, torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
        use_sliding_window=False,
    ),
    "Llama-3.2-1B": config(
        "llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009], head_dim=64, initializer_range=0.02, mlp_bias=False, pretraining_tp=1,
        rope_scaling=LLAMA_31_ROPE | {"factor": 32.0}, torch_dtype="bfloat16", transformers_version="4.45.0.dev0",
        tie_word_embeddings=True, use_cache=True,
    ),
    "Llama-2-7b": config(
        "llama", _name_or_path="meta-llama/Llama-2-7b-hf", architectures=["LlamaForCausalLM"], bos_token_id=1,
        eos_token_id=2, initializer_range=0.02, pretraining_tp=1, rope_scaling=None, torch_dtype="float16",
        transformers_version="4.31.0.dev0", use_cache=True,
    ),
    "SmolLM2-135M": config(
        "llama", architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
        eos_token_id=0, initializer_range=0.041666666666666664, is_llama_config=True, mlp_bias=False, pretraining_tp=1,
        rope_interleaved=False, rope_scaling=None, torch_dtype="bfloat16", use_cache=True,
        **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    ),
    "Mistral-7B-v0.3": config(
        "mistral", architectures=["MistralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.02, sliding_window=None, torch_dtype="bfloat16", transformers_version="4.42.0.dev0",
        use_cache=True,
    ),
    "Mistral-Nemo-Base-2407": config(
        "mistral", architectures=["MistralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
        head_dim=128, initializer_range=0.02, sliding_window=None, torch_dtype="bfloat16", use_cache=True,
    ),
    # A Llama of 2023, and what tools that go through any model leave in a file.
    "vicuna-7b-v1.3": config(
        "llama", architectures=["LlamaForCausalLM"], max_sequence_length=2048, pad_token_id=0, use_cache=True,
        tf_legacy_loss=False, initializer_range=0.02,
    ),
    "a llama made from a Qwen2": config(
        "llama", use_sliding_window=False, sliding_window=None, use_flash_attention_2=True, model_max_length=4096,
    ),
    "a mistral made from a llama": config("mistral", pretraining_tp=1, sliding_window=None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_keys_of_published_models_are_known(name: str):
    """The key sets and switches as published; sizes are small."""
    assert Architecture.from_hf_config(PUBLISHED[name]).num_layers == 3
