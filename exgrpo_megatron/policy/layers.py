"""The layers of the decoder: Transformer Engine's, or Megatron-Core's own with the two that its set lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from exgrpo_megatron.acceleration import Acceleration
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.policy.attention import CausalAttention


def acceleration_options(policy: PolicyConfig, chosen: Acceleration) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that say what `chosen` computes with."""
    fp8 = policy.megatron_cfg.fp8_cfg
    local = chosen.layers == "local"
    return {
        "transformer_impl": chosen.layers,
        "apply_rope_fusion": chosen.rope_fusion.on,
        "bias_activation_fusion": chosen.activation_fusion.on,
        # Megatron's own layers read it. Of Transformer Engine's `fuse_gradients` takes care: Megatron's output layer
        # would refuse to be built with it for want of apex, though nothing calls its backward pass.
        "gradient_accumulation_fusion": local and chosen.gradient_fusion.on,
        **({"fp8": fp8.fp8, "fp8_recipe": fp8.fp8_recipe, "fp8_param": False} if chosen.fp8 else {}),
        # There is nothing in these layers that the others would fuse: no bias, no dropout, no masked softmax outside
        # the attention, no layer norm of apex.
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def decoder_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules | ModuleSpec:
    """The layers that `config.transformer_impl` names: Transformer Engine's, or Megatron-Core's own with `RMSNorm` and
    `CausalAttention`.

    `chunk`: which of the virtual pipeline's on this stage; None without one.
    """
    if config.transformer_impl == "transformer_engine":
        assert megatron_te.HAVE_TE, "accelerators.installed() found Transformer Engine, and Megatron-Core did not"
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


def fuse_gradients(chunk: torch.nn.Module) -> int:
    """Let Transformer Engine's linear layers add the gradients of their weights to Megatron's float32 sums themselves.

    Returns the number of layers that will.
    """
    linears = [module for module in chunk.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    for module in linears:
        module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    return len(linears)


@contextmanager
def without_fp8(chunks: Sequence[MegatronModule]) -> Iterator[None]:
    """Forward passes of the chunks compute as their weights are: bfloat16, as whoever loads an export does."""
    formats = [chunk.config.fp8 for chunk in chunks]
    for chunk in chunks:
        chunk.config.fp8 = None
    try:
        yield
    finally:
        for chunk, fp8 in zip(chunks, formats, strict=True):
            chunk.config.fp8 = fp8


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that sequence parallelism may use: Megatron-Core's wrapper of torch's refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Tells Megatron to sum this weight's gradient over the tensor-parallel ranks, each of which saw other tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
