"""What a model family is: its tensors under both sides' names, and what the keys of its config.json mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Table: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Megatron parameter -> its Hugging Face tensors -> their dimensions, named as in `mapping._sizes`."""

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT_LAYER = "output_layer.weight"

TOP: Table = {
    EMBEDDING: {"model.embed_tokens.weight": ("vocab", "hidden")},
    FINAL_NORM: {"model.norm.weight": ("hidden",)},
    OUTPUT_LAYER: {"lm_head.weight": ("vocab", "hidden")},
}
"""Outside the layers."""

DENSE_LAYER: Table = {
    "input_layernorm.weight": {"input_layernorm.weight": ("hidden",)},
    "self_attention.linear_qkv.weight": {
        "self_attn.q_proj.weight": ("queries", "hidden"),
        "self_attn.k_proj.weight": ("keys", "hidden"),
        "self_attn.v_proj.weight": ("keys", "hidden"),
    },
    "self_attention.linear_proj.weight": {"self_attn.o_proj.weight": ("hidden", "queries")},
    "pre_mlp_layernorm.weight": {"post_attention_layernorm.weight": ("hidden",)},
    "mlp.linear_fc1.weight": {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    "mlp.linear_fc2.weight": {"mlp.down_proj.weight": ("hidden", "ffn")},
}
"""A layer of a dense decoder without biases, with a gated MLP and a norm before each half."""

QKV_BIAS: Table = {
    "self_attention.linear_qkv.bias": {
        "self_attn.q_proj.bias": ("queries",),
        "self_attn.k_proj.bias": ("keys",),
        "self_attn.v_proj.bias": ("keys",),
    },
}

QK_NORM: Table = {
    "self_attention.q_layernorm.weight": {"self_attn.q_norm.weight": ("head",)},
    "self_attention.k_layernorm.weight": {"self_attn.k_norm.weight": ("head",)},
}


@dataclass(frozen=True)
class Family:
    """One `model_type`. A key of config.json that none of the rules here or in `config_keys` names is refused."""

    model_type: str
    layer: Table
    """Of one layer; Hugging Face names without `model.layers.N.`."""
    top: Table = field(default_factory=lambda: TOP)
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for a key that config.json does not have, where that differs between families."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change what is computed, with the one value that is mapped (null is accepted too)."""
    harmless: Mapping[str, str] = field(default_factory=dict)
    """Keys that change nothing here whatever their value, with the reason."""

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have biases."""
        return "self_attention.linear_qkv.bias" in self.layer

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised a head."""
        return "self_attention.q_layernorm.weight" in self.layer
