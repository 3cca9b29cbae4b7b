"""Tiny real transformers models of every supported family, with no two sizes equal and several queries per group."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
FAMILIES = sorted(CLASSES)


def tiny_model(family: str, tied: bool, **sizes_instead: int) -> PreTrainedModel:
    """Random weights, biases and norms included; head_dim differs from hidden / heads but in Qwen2."""
    config_class, model_class = CLASSES[family]
    sizes = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    if family != "qwen2":
        sizes["head_dim"] = 6
    if family == "mistral":
        sizes["sliding_window"] = None
    torch.manual_seed(0)
    model = model_class(config_class(**sizes | sizes_instead))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.eval()


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict as transformers saves it: a tied model has no output layer of its own."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors
