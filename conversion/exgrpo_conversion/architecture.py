"""The shape of a supported model, read from its config.json; everything else is refused by key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(ValueError):
    """A model (or parameter) that the weight mapping does not cover; names the key, its value and what is supported."""

    def __init__(self, key: str, value: object, supported: str) -> None:
        super().__init__(f"{key} = {value!r} is not supported: {supported}")
        self.key = key
        self.value = value
        self.supported = supported


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of the rotary embedding as introduced by Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """What the weight mapping and the Megatron model need to know about a dense decoder.

    `family` selects the tensor table: "qwen2", "qwen3" or "llama" (Mistral without a sliding window is "llama").
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_positions: int

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read the dictionary of a config.json, written by transformers 4 or 5.

        Raises:
            UnsupportedModelError: the config asks for something that the mapping does not reproduce exactly.
        """
        model = _supported_model(config)
        _refuse_unmapped(config, model)
        hidden_size = _positive_int(config, "hidden_size")
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", model.kv_heads_if_absent or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                "num_key_value_heads", num_kv_heads, f"a divisor of the {num_heads} query heads"
            )
        return cls(
            family=model.family,
            num_layers=_positive_int(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, model, hidden_size, num_heads),
            ffn_size=_positive_int(config, "intermediate_size"),
            vocab_size=_positive_int(config, "vocab_size"),
            tied=_flag(config, "tie_word_embeddings"),
            qkv_bias=model.qkv_bias,
            qk_norm=model.qk_norm,
            norm_eps=_positive_float("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(config),
            rope_scaling=_rope_scaling(config),
            max_positions=_positive_int(config, "max_position_embeddings"),
        )


def padded_vocab_size(vocab: int, divisible_by: int, tp_size: int) -> int:
    """The vocabulary rows Megatron allocates: `vocab` rounded up to a multiple of `divisible_by * tp_size`."""
    multiple = divisible_by * tp_size
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class _Model:
    """One `model_type`: its tensor table and what transformers assumes where config.json is silent."""

    family: str
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads_if_absent: int | None = None  # None: as many as query heads
    head_dim_if_absent: int | None = None  # None: hidden_size / query heads
    sliding_window_if_absent: int | None = None


_MODELS = {
    "qwen2": _Model("qwen2", qkv_bias=True, kv_heads_if_absent=32),
    "qwen3": _Model("qwen3", qk_norm=True, kv_heads_if_absent=32, head_dim_if_absent=128),
    "llama": _Model("llama"),
    "mistral": _Model("llama", kv_heads_if_absent=8, sliding_window_if_absent=4096),
}

# Megatron-Core's llama3 scaling takes the factor only; the other three numbers are constants in its code.
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _supported_model(config: Mapping[str, Any]) -> _Model:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        raise UnsupportedModelError("model_type", model_type, f"one of {', '.join(_MODELS)}")
    classes = config.get("architectures") or ()
    if classes and not any(str(name).endswith("ForCausalLM") for name in classes):
        raise UnsupportedModelError("architectures", classes, "causal language models (…ForCausalLM)")
    return _MODELS[model_type]


def _refuse_unmapped(config: Mapping[str, Any], model: _Model) -> None:
    """Refuse the options that would change the function computed, or the set of tensors."""
    _require(config, "hidden_act", "silu")
    _require(config, "attention_dropout", 0)
    _require(config, "use_sliding_window", False)
    _require(config, "mlp_bias", False)
    _require(config, "partial_rotary_factor", 1)
    _require(config, "quantization_config", None)
    if not model.qkv_bias:  # qwen2 has its biases by definition; transformers does not read the key there
        _require(config, "attention_bias", False)
    if config.get("model_type") == "mistral":
        window = config.get("sliding_window", model.sliding_window_if_absent)
        _require({"sliding_window": window}, "sliding_window", None)
    layer_types = config.get("layer_types") or ()
    if set(layer_types) - {"full_attention"}:
        raise UnsupportedModelError("layer_types", sorted(set(layer_types)), "full_attention in every layer")


def _require(config: Mapping[str, Any], key: str, only: object) -> None:
    """Accept an absent or null key, or the one supported value."""
    value = config.get(key)
    if value is not None and value != only:
        raise UnsupportedModelError(key, value, f"only {only!r}")


def _head_dim(config: Mapping[str, Any], model: _Model, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and model.head_dim_if_absent is None and hidden_size % num_heads:
        raise UnsupportedModelError(
            "num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}, or an explicit head_dim"
        )
    head_dim = _positive_int(config, "head_dim", model.head_dim_if_absent or hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError("head_dim", head_dim, "an even number (rotary embedding turns pairs)")
    return head_dim


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings: `rope_parameters` (transformers 5), else `rope_scaling` (transformers 4)."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedModelError(key, rope, "one set of rotary settings for all layers")
    return rope


def _rope_theta(config: Mapping[str, Any]) -> float:
    theta = _rope(config).get("rope_theta", config.get("rope_theta"))
    return _positive_float("rope_theta", 10000.0 if theta is None else theta)


def _rope_scaling(config: Mapping[str, Any]) -> Llama3RopeScaling | None:
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise UnsupportedModelError("rope_type", kind, "default or llama3")
    _require(rope, "partial_rotary_factor", 1)
    if kind == "default":
        return None
    for key, constant in _LLAMA3_CONSTANTS.items():
        if rope.get(key) != constant:
            raise UnsupportedModelError(f"llama3 {key}", rope.get(key), f"only {constant} (fixed in Megatron-Core)")
    return Llama3RopeScaling(
        factor=_positive_float("llama3 factor", rope.get("factor")),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(key, value, "a positive integer")
    return value


def _positive_float(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(key, value, "a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise UnsupportedModelError(key, value, "true or false")
    return value
