"""Bytes of the rollout engine on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.plan.parameters import model_elements

_FLOAT32 = 4


@dataclass(frozen=True)
class RolloutBytes:
    """What the engine takes."""

    weights: int
    """Whole, or this rank's part of them."""
    kv_cache: int
    loading: int
    """More while new weights are pushed."""
    sleeps: bool
    """Whether its memory is free for training between rollouts."""
    kv_tokens: int
    """Positions that the cache has room for."""


def kv_token_bytes(arch: Architecture, number_bytes: int, tensor_parallel: int = 1) -> int:
    """Keys and values of one position in all layers."""
    return 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * number_bytes // tensor_parallel


def embedded_rollout(arch: Architecture, *, rows: int, columns: int) -> RolloutBytes:
    """The embedded engine, which works in float32 and has the whole model on every rank.

    New weights are put together beside the old ones. `rows` responses are sampled at once, each up to `columns`
    positions long, its prompt included.
    """
    weights = _FLOAT32 * model_elements(arch)
    return RolloutBytes(
        weights=weights,
        kv_cache=rows * columns * kv_token_bytes(arch, _FLOAT32),
        loading=weights,
        sleeps=False,
        kv_tokens=rows * columns,
    )


def vllm_rollout(
    arch: Architecture, *, budget: int, kv_cache: int | None, tensor_parallel: int, number_bytes: int
) -> RolloutBytes:
    """vLLM with `budget` bytes of the GPU, of which keys and values get what the weights leave, or with so many bytes
    of `kv_cache`. Asleep it leaves the GPU to training, and keeps its weights in the memory of the machine."""
    weights = number_bytes * model_elements(arch) // tensor_parallel
    cache = max(0, budget - weights) if kv_cache is None else kv_cache
    position = kv_token_bytes(arch, number_bytes, tensor_parallel)
    return RolloutBytes(weights=weights, kv_cache=cache, loading=0, sleeps=True, kv_tokens=cache // position)
