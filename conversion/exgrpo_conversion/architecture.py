"""The shape of a supported model, read from its config.json; everything else is refused by key and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exgrpo_conversion import config_keys
from exgrpo_conversion.families import FAMILIES, Family


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

    `family` is the `model_type`, a key of `families.FAMILIES`, which has the names of the tensors.
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
            UnsupportedModelError: the config asks for something that the mapping does not reproduce exactly, or has a
                key of which that is not known.
        """
        family = _family(config)
        config = {**family.absent, **config}
        _refuse_unmapped(config, family)
        num_heads = _positive_int(config, "num_attention_heads")
        num_kv_heads = _positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                "num_key_value_heads", num_kv_heads, f"a divisor of the {num_heads} query heads"
            )
        theta, scaling = _rope(config)
        return cls(
            family=family.model_type,
            num_layers=_positive_int(config, "num_hidden_layers"),
            hidden_size=_positive_int(config, "hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, num_heads),
            ffn_size=_positive_int(config, "intermediate_size"),
            vocab_size=_positive_int(config, "vocab_size"),
            tied=_flag(config, "tie_word_embeddings"),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=_positive_float("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_positive_int(config, "max_position_embeddings"),
        )


def padded_vocab_size(vocab: int, divisible_by: int, tp_size: int) -> int:
    """The vocabulary rows Megatron allocates: `vocab` rounded up to a multiple of `divisible_by * tp_size`."""
    multiple = divisible_by * tp_size
    return -(-vocab // multiple) * multiple


# Megatron-Core's llama3 scaling takes the factor only; the other three numbers are constants in its code. A model
# could be given other frequencies once it is built, but no checkpoint would say so: Megatron-LM would load it wrong.
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_ROPE_KEYS = {
    "default": {"type", "rope_type", "rope_theta", "partial_rotary_factor"},
    "llama3": {"type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", *_LLAMA3_CONSTANTS},
}
"""What the rotary settings of each supported kind may hold."""


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError("model_type", model_type, f"one of {', '.join(FAMILIES)}")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or (classes and not any(str(name).endswith("ForCausalLM") for name in classes)):
        raise UnsupportedModelError("architectures", classes, "causal language models (…ForCausalLM)")
    return FAMILIES[model_type]


def _refuse_unmapped(config: Mapping[str, Any], family: Family) -> None:
    """Refuse what would change the function computed or the set of tensors, and what nobody knows about."""
    only = {**config_keys.ONLY, **family.only}
    for key, value in config.items():
        if key in family.harmless:
            continue
        if key in only:
            _require(config, key, only[key])
        elif value is not None and key not in config_keys.READ and key not in config_keys.HARMLESS:
            raise UnsupportedModelError(
                key, value, f"no key of {family.model_type} models that is known to be mapped or to change nothing"
            )
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError("layer_types", layer_types, "full_attention in every layer")


def _require(config: Mapping[str, Any], key: str, only: object) -> None:
    """Accept an absent or null key, or the one supported value."""
    value = config.get(key)
    if value is not None and value != only:
        raise UnsupportedModelError(key, value, f"only {only!r}")


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    hidden_size = _positive_int(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModelError(
            "num_attention_heads", num_heads, f"a divisor of hidden_size {hidden_size}, or an explicit head_dim"
        )
    head_dim = _positive_int(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError("head_dim", head_dim, "an even number (rotary embedding turns pairs)")
    return head_dim


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """Base and scaling: of `rope_parameters` (transformers 5), `rope_scaling` and `rope_theta` (transformers 4).

    Who finds several of them does not know which one another program would take: they must agree.
    """
    found = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    thetas = {"rope_theta": config.get("rope_theta")}
    scalings = {}
    for key, rope in found.items():
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise UnsupportedModelError(key, rope, "one set of rotary settings for all layers")
        thetas[f"{key}.rope_theta"] = rope.get("rope_theta")
        scalings[key] = _rope_scaling(key, rope)
    thetas = {key: theta for key, theta in thetas.items() if theta is not None}
    theta = next(iter(thetas.values()), 10000.0)
    if any(other != theta for other in thetas.values()):
        raise UnsupportedModelError("rope_theta", thetas, "the same value in every place")
    if len(set(scalings.values())) > 1:
        raise UnsupportedModelError("rope_scaling", found, "the same settings under both keys")
    return _positive_float("rope_theta", theta), next(iter(scalings.values()), None)


def _rope_scaling(key: str, rope: Mapping[str, Any]) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise UnsupportedModelError("rope_type", kind, "default or llama3")
    _require(rope, "partial_rotary_factor", 1)
    unknown = [name for name, value in rope.items() if value is not None and name not in _ROPE_KEYS[kind]]
    if unknown:
        raise UnsupportedModelError(f"{key}.{unknown[0]}", rope[unknown[0]], f"no setting of {kind} rotary embeddings")
    if kind == "default":
        return None
    for name, constant in _LLAMA3_CONSTANTS.items():
        if rope.get(name) != constant:
            raise UnsupportedModelError(f"llama3 {name}", rope.get(name), f"only {constant} (fixed in Megatron-Core)")
    return Llama3RopeScaling(
        factor=_positive_float("llama3 factor", rope.get("factor")),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    most = _MAX_LAYERS if key == "num_hidden_layers" else _MAX_SIZE
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise UnsupportedModelError(key, value, f"a positive integer up to {most}")
    return value


# The list of a model's tensors is as long as a config.json says, which may come from anyone.
_MAX_LAYERS, _MAX_SIZE = 10_000, 2**31 - 1


def _positive_float(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise UnsupportedModelError(key, value, "a positive number")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise UnsupportedModelError(key, value, "true or false")
    return value
