"""Small real models and an objective written down a second time, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from exgrpo_megatron.config import OptimizerConfig, PolicyConfig, SchedulerConfig
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel
from exgrpo_megatron.types import TrainSequence

transformers_logging.disable_progress_bar()

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen2": lambda **sizes: Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes, tie_word_embeddings=True)),
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**SIZES | sizes, tie_word_embeddings=False)),
    "llama3": lambda **sizes: LlamaForCausalLM(
        LlamaConfig(**SIZES | sizes, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)
    ),
    "qwen3": lambda **sizes: Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes, head_dim=16, tie_word_embeddings=False)),
}


def save_model(family: str, folder: Path, **sizes: int) -> PreTrainedModel:
    """A two-layer model with no weight at its initial value (biases are not 0, norms not 1), saved to `folder`."""
    torch.manual_seed(7)
    model = FAMILIES[family](**sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def make_actor(
    folder: Path,
    group: DataParallel,
    optimizer: OptimizerConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    total_updates: int = 10,
    **policy: Any,
) -> MegatronActor:
    return MegatronActor(
        folder,
        PolicyConfig(model_name=str(folder), **policy),
        # A large epsilon keeps AdamW from turning rounding noise of vanishing gradients into whole steps.
        optimizer or OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_eps=1e-4),
        scheduler or SchedulerConfig(),
        total_updates=total_updates,
        comm=group,
    )


def random_sequences(count: int, seed: int = 0, vocab: int = 37, max_response: int = 14) -> list[TrainSequence]:
    """Sequences of different lengths, fresh and replayed, with old log-probs off the policy and different weights,
    every second with weights of its tokens too."""
    generator, of_tokens = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    sequences = []
    for index in range(count):
        prompt = generator.integers(0, vocab, generator.integers(1, 9), dtype=np.int32)
        response = generator.integers(0, vocab, generator.integers(1, max_response + 1), dtype=np.int32)
        sequences.append(
            TrainSequence(
                prompt_ids=prompt,
                response_ids=response,
                old_logprobs=generator.normal(-3.5, 0.4, len(response)).astype(np.float32),
                advantage=float(generator.normal()),
                replayed=index % 3 == 0,
                policy_weight=float(generator.uniform(0.01, 0.03)),
                entropy_weight=float(generator.uniform(0.001, 0.003)),
                token_weights=of_tokens.uniform(0, 2, len(response)).astype(np.float32) if index % 2 else None,
            )
        )
    return sequences


def plain_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of each response token, by log_softmax over transformers' logits."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)


def plain_loss(model: PreTrainedModel, sequences: list[TrainSequence], temperature: float) -> torch.Tensor:
    """The default objective of ALGORITHM.md: PPO clip 0.2 for fresh tokens, w / (w + 0.1) for replayed ones."""
    total = torch.zeros(())
    for item in sequences:
        logprobs, entropies = plain_logprobs(model, item.prompt_ids, item.response_ids, temperature)
        ratio = (logprobs - torch.from_numpy(item.old_logprobs)).exp()
        if item.replayed:
            terms = -item.advantage * ratio / (ratio + 0.1)
        else:
            terms = -torch.minimum(item.advantage * ratio, item.advantage * ratio.clamp(0.8, 1.2))
        if item.token_weights is not None:
            terms = terms * torch.from_numpy(item.token_weights)
        total = total + item.policy_weight * terms.sum() - item.entropy_weight * entropies.sum()
    return total


def plain_adamw(model: PreTrainedModel, optimizer: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW as Megatron groups it: biases and norms (one-dimensional weights) are not decayed."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=optimizer.lr,
        betas=(optimizer.adam_beta1, optimizer.adam_beta2),
        eps=optimizer.adam_eps,
    )


def max_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def hf_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """State dict without the output layer of a tied model."""
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state
