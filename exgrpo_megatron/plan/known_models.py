"""Shapes of models that people train with this, by Hugging Face name: `exgrpo show` works before the download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.config_file import read_config
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_megatron.errors import ConfigError


def _qwen2(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        **other,
    }


def _llama31(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }


_QWEN25_7B = (3584, 18944, 28, 28, 4)
_LLAMA31_8B = _llama31(4096, 14336, 32, 32)
_LLAMA31_70B = _llama31(8192, 28672, 80, 64)

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "embedded:chain-qwen2": _qwen2(
        128, 384, 2, 4, 2, vocab_size=21, rope_theta=1e4, tie_word_embeddings=True, max_position_embeddings=1024
    ),
    "embedded:symbols-qwen2": _qwen2(
        96, 288, 2, 4, 2, vocab_size=42, rope_theta=1e4, tie_word_embeddings=True, max_position_embeddings=1024
    ),
    "Qwen/Qwen2.5-Math-1.5B": _qwen2(
        1536, 8960, 28, 12, 2, vocab_size=151936, rope_theta=1e4, tie_word_embeddings=True, max_position_embeddings=4096
    ),
    # The same with the changed config.json that recipes/qwen2.5_math_1.5b_1gpu.yaml asks for.
    "models/Qwen2.5-Math-1.5B-16k": _qwen2(
        1536,
        8960,
        28,
        12,
        2,
        vocab_size=151936,
        rope_theta=4e4,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
    ),
    "Qwen/Qwen2.5-Math-7B": _qwen2(*_QWEN25_7B, rope_theta=1e4, max_position_embeddings=4096),
    "Elliott/Qwen2.5-Math-7B-16k-think": _qwen2(*_QWEN25_7B, rope_theta=4e4, max_position_embeddings=16384),
    "Qwen/Qwen2-7B-Instruct": _qwen2(*_QWEN25_7B, max_position_embeddings=32768),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2(*_QWEN25_7B, max_position_embeddings=32768),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, rms_norm_eps=1e-5, max_position_embeddings=131072),
    "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA31_70B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA31_70B,
}
"""The keys of config.json that decide layout and memory."""


def find_architecture(model_name: str) -> tuple[Architecture, str] | None:
    """The architecture of `policy.model_name` and where it is known from; None where there is neither a folder of that
    name nor a known shape.

    Raises:
        ConfigError: the folder's config.json cannot be used.
    """
    if Path(model_name).is_dir():
        try:
            return Architecture.from_hf_config(read_config(model_name)), f"{model_name}/config.json"
        except (UnsupportedModelError, ModelFolderError) as error:
            raise ConfigError(f"policy.model_name = {model_name!r}: {error}") from None
    for name, shape in KNOWN_MODELS.items():
        if model_name == name or model_name.rpartition("/")[2] == name.rpartition("/")[2]:
            return Architecture.from_hf_config(shape), f"the known shape of {name}; there is no folder of that name"
    return None
