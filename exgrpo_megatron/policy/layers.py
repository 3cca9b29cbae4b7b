"""The two layers that Megatron-Core's own set lacks without Transformer Engine, and the layer spec that uses them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def transformer_engine_usable() -> bool:
    """Whether layers can come from Transformer Engine: it is installed, and there is a GPU to run it on."""
    return torch.cuda.is_available() and megatron_te.HAVE_TE


def decoder_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """Layers of the decoder: Transformer Engine's where usable, else Megatron-Core's own with the two below.

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


class CausalAttention(MegatronModule):
    """Causal self-attention by torch's scaled_dot_product_attention, for the core-attention slot of a layer."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002 (Megatron passes it)
        attn_mask_type: Any,  # noqa: ARG002
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert (attention_type, config.attention_dropout, config.context_parallel_size) == ("self", 0, 1)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[positions, batch, heads, head_dim] to [positions, batch, heads * head_dim]; keys and values have kv_heads.

        Sequences are padded on the right, so the causal mask alone keeps real positions from seeing padding.
        """
        assert all(unsupported is None for unsupported in (attention_mask, attention_bias, packed_seq_params))
        positions, batch, _, _ = query.shape
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return attended.permute(2, 0, 1, 3).reshape(positions, batch, -1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
