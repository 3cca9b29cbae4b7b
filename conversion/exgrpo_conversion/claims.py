"""What a Megatron checkpoint says of its own model, in Megatron's words, held against a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.errors import ModelFolderError


@dataclass(frozen=True)
class Claims:
    """Settings of a model as Megatron's arguments or a TransformerConfig name them; others may be among them."""

    where: str
    """The file they were read from."""
    values: Mapping[str, Any]


def check_claims(arch: Architecture, claims: Claims, config_folder: Path) -> None:
    """Raise ModelFolderError where the checkpoint is of another model than the config.

    Settings that are absent or None say nothing; those without a counterpart in `arch` are not looked at.
    """
    values = {key: value for key, value in claims.values.items() if value is not None}
    if values.get("group_query_attention") is False:
        values.pop("num_query_groups", None)  # its default is then without meaning
    if arch.rope_scaling is None:
        values.pop("rope_scaling_factor", None)
    differences = [
        f"{key} = {values[key]!r}, the config means {expected(arch)!r}"
        for key, expected in _EXPECTED.items()
        if key in values and not _same(values[key], expected(arch))
    ]
    if differences:
        raise ModelFolderError(
            f"{claims.where} is of another model than {config_folder}: {'; '.join(differences)}; "
            "give the Hugging Face folder of this model"
        )


_EXPECTED: dict[str, Callable[[Architecture], Any]] = {
    "num_layers": lambda arch: arch.num_layers,
    "hidden_size": lambda arch: arch.hidden_size,
    "ffn_hidden_size": lambda arch: arch.ffn_size,
    "num_attention_heads": lambda arch: arch.num_heads,
    "num_query_groups": lambda arch: arch.num_kv_heads,
    "kv_channels": lambda arch: arch.head_dim,
    "norm_epsilon": lambda arch: arch.norm_eps,
    "layernorm_epsilon": lambda arch: arch.norm_eps,
    "rotary_base": lambda arch: arch.rope_theta,
    "use_rope_scaling": lambda arch: arch.rope_scaling is not None,
    "rope_scaling": lambda arch: arch.rope_scaling is not None,
    "rope_scaling_factor": lambda arch: arch.rope_scaling.factor if arch.rope_scaling is not None else None,
    "qk_layernorm": lambda arch: arch.qk_norm,
    "add_qkv_bias": lambda arch: arch.qkv_bias,
    "untie_embeddings_and_output_weights": lambda arch: not arch.tied,
    "share_embeddings_and_output_weights": lambda arch: arch.tied,
    "normalization": lambda _: "RMSNorm",
    "position_embedding_type": lambda _: "rope",
    "swiglu": lambda _: True,
    "gated_linear_unit": lambda _: True,
    "add_bias_linear": lambda _: False,
    "rotary_percent": lambda _: 1.0,
    "rotary_interleaved": lambda _: False,
    "apply_layernorm_1p": lambda _: False,
    "layernorm_zero_centered_gamma": lambda _: False,
    "multi_latent_attention": lambda _: False,
}
"""Megatron's name of a setting -> what it is in a model that the mapping covers."""


def _same(claimed: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(claimed, int | float):
        return abs(claimed - expected) <= 1e-6 * abs(expected)
    if isinstance(expected, bool) and not isinstance(claimed, bool):
        return True  # not a plain flag (a scaling given as a dictionary, say): no statement to compare
    return bool(claimed == expected)
