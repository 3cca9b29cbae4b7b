"""Small models that vLLM's CPU attention can run (heads of 32), an engine around one, and what it is compared with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("unit/policy", "distributed")]

from exgrpo_conversion.architecture import Architecture  # noqa: E402
from exgrpo_conversion.hf_folder import read_config  # noqa: E402
from exgrpo_megatron.config import VllmConfig  # noqa: E402
from exgrpo_megatron.policy.actor import MegatronActor  # noqa: E402
from exgrpo_megatron.rollout.protocol import RolloutEngine, SampledResponse, SampleRequest, SamplingParams  # noqa: E402
from exgrpo_megatron.rollout.vllm_checks import is_installed  # noqa: E402

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed: make setup-vllm"),
]
"""Marks of every test here."""

VOCAB = 37
"""No multiple of 64: vLLM pads the vocabulary."""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "qwen2": lambda tied: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)),
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)),
}
TOLERANCE = 1e-5
"""Nats, float32 against float32."""


def save_model(folder: Path, family: str, *, tied: bool) -> Path:
    """A model none of whose tensors keeps its initial value."""
    torch.manual_seed(3)
    model = FAMILIES[family](tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_engine(folder: Path, **cfg: Any) -> RolloutEngine:
    """A vLLM engine for the model in `folder`, without weights yet."""
    from exgrpo_megatron.rollout.vllm_engine import VLLMEngine
    from exgrpo_megatron.rollout.vllm_process import VLLMSettings

    settings = VLLMSettings(folder, VllmConfig(**cfg), torch.float32, 256, 32, 2**26)
    return VLLMEngine(Architecture.from_hf_config(read_config(folder)), settings)


def requests(seed: int = 0, count: int = 4, samples: int = 4) -> list[SampleRequest]:
    """Prompts of 3 to 150 tokens: the long ones fill a block of the prefix cache (128 tokens on CPUs)."""
    rng = np.random.default_rng(seed)
    lengths = [3, 150, 17, 140][:count]
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
    return [SampleRequest(prompt, tuple(range(10 * i, 10 * i + samples))) for i, prompt in enumerate(prompts)]


def sampling(temperature: float = 0.8, max_new_tokens: int = 24) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature, stop_token_ids=(2, 5))


def largest_difference(
    actor: MegatronActor, asked: list[SampleRequest], answers: list[list[SampledResponse]], temperature: float
) -> float:
    """Between the engine's log-probs of its answers and the actor's of the same tokens, in nats."""
    pairs = [(request.prompt_ids, answer) for request, some in zip(asked, answers, strict=True) for answer in some]
    scored = actor.score([(prompt, answer.token_ids) for prompt, answer in pairs], temperature)
    return max(
        float(np.abs(score.logprobs - answer.logprobs).max()) for score, (_, answer) in zip(scored, pairs, strict=True)
    )


def token_lists(answers: list[list[SampledResponse]]) -> list[list[list[int]]]:
    return [[answer.token_ids.tolist() for answer in some] for some in answers]
