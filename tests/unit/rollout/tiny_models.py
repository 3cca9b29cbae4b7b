"""Tiny transformers models with random weights everywhere, and what the engine is compared with."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.rollout.protocol import SampledResponse
from exgrpo_megatron.rollout.torch_engine import TorchEngine

_SHARED = {"vocab_size": 21, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

CONFIGS = {
    "qwen2 tied, biases": lambda: transformers.Qwen2Config(
        **_SHARED, hidden_size=32, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen3 untied, head_dim 16 of hidden 24": lambda: transformers.Qwen3Config(
        **_SHARED, hidden_size=24, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False
    ),
    "qwen3 tied, one key-value head": lambda: transformers.Qwen3Config(
        **_SHARED, hidden_size=32, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True
    ),
    "llama untied, all heads their own": lambda: transformers.LlamaConfig(
        **_SHARED, hidden_size=32, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "llama untied, head_dim 6 of hidden 32, llama3 rope": lambda: transformers.LlamaConfig(
        **_SHARED,
        hidden_size=32,
        num_key_value_heads=2,
        head_dim=6,
        rope_parameters=_LLAMA3_ROPE,
        tie_word_embeddings=False,
    ),
}


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A model none of whose tensors keeps its initial value: biases are not 0 and norms not 1."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    return model


def hf_weights(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def engine_of(model: transformers.PreTrainedModel, *, max_batch_size: int = 64, version: int = 3) -> TorchEngine:
    engine = TorchEngine(Architecture.from_hf_config(model.config.to_dict()), max_batch_size=max_batch_size)
    engine.load_weights(hf_weights(model).items(), version)
    return engine


def prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 21, size=length).astype(np.int32) for length in lengths]


@torch.no_grad()
def full_forward_logprobs(
    model: transformers.PreTrainedModel, prompt: np.ndarray, response: SampledResponse, temperature: float
) -> np.ndarray:
    """Log-probs of the response tokens by one uncached forward over prompt and response."""
    ids = torch.tensor([*prompt.tolist(), *response.token_ids.tolist()])
    logprobs = torch.log_softmax(model(ids[None]).logits[0].float() / temperature, dim=-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1).numpy()
