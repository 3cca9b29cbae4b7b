"""The layers of the decoder: Transformer Engine's, or Megatron-Core's own with the two that its set lacks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from exgrpo_megatron.policy.attention import CausalAttention


def transformer_engine_usable() -> bool:
    """Whether layers can come from Transformer Engine: it is installed, and there is a GPU to run it on."""
    return torch.cuda.is_available() and megatron_te.HAVE_TE


def decoder_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """Transformer Engine's layers where usable, else Megatron-Core's own with `RMSNorm` and `CausalAttention`.

    `chunk`: which of the virtual pipeline's on this stage; None without one.
    """
    if transformer_engine_usable():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that sequence parallelism may use: Megatron-Core's wrapper of torch's refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Tells Megatron to sum this weight's gradient over the tensor-parallel ranks, each of which saw other tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
