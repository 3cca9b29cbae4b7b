"""What a real actor has allocated, in bytes, and what the plan says it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.plan.parameters import stages
from exgrpo_megatron.plan.ranks import Ranks
from exgrpo_megatron.plan.training_memory import held_bytes
from exgrpo_megatron.policy.actor import MegatronActor


def storage_bytes(tensors: Iterable[Tensor], known: set[int] | None = None) -> int:
    """Of the memory behind tensors, once where they share it, and not where it is `known`, to which it is added."""
    known = set() if known is None else known
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def chunks(model: Any) -> list[Any]:
    """The parts of the model that are here: one, or a list of them where stages are cut into chunks."""
    return list(model) if isinstance(model, list | tuple) else [model]


def parameters(actor: MegatronActor) -> list[torch.nn.Parameter]:
    return [parameter for part in chunks(actor._gpt) for parameter in part.parameters()]


def allocated(actor: MegatronActor) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of this process; the optimizer's state is made here."""
    optimizer = actor._optimizer
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.init_state_fn(inner.optimizer, inner.config)
    known: set[int] = set()
    weights = storage_bytes(parameters(actor), known)
    gradients = storage_bytes((buffer.grad_data for part in chunks(actor._model) for buffer in part.buffers), known)
    state = []
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in inner.optimizer.param_groups:
            state += group["params"]
            # `step` is one number a parameter on torch's AdamW, and none with Transformer Engine's.
            state += [
                tensor
                for parameter in group["params"]
                for name, tensor in inner.optimizer.state[parameter].items()
                if name != "step"
            ]
    return weights, gradients, storage_bytes(state, known)


def planned(actor: MegatronActor, layout: MegatronConfig, ranks: Ranks, stage: int) -> tuple[int, int, int]:
    number_bytes = 2 if parameters(actor)[0].dtype == torch.bfloat16 else 4
    held = held_bytes(stages(actor.architecture, layout, layout.chunks)[stage], ranks, layout, number_bytes)
    return held.weights, held.gradients, held.optimizer
