"""The optimizer's state by parameter, whole: the same in a checkpoint whoever keeps which part of it.

Megatron-Core has a form of its own for either optimizer, which the other cannot read, and with torch's AdamW three
faults in that of the distributed one: a new optimizer asserts that it has steps; loading fails for want of `step`; and
all parameters end up with one `step` tensor between them, which AdamW then raises once for each, so that the bias
correction is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "fp32_param"
"""The float32 original of a bfloat16 weight."""


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Optimiser steps behind the state; 0 before the first one."""
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            # Transformer Engine's Adam counts by group, torch's by parameter.
            count = group.get("step", optimizer.optimizer.state.get(parameter, {}).get("step", 0))
            return int(count)
    return 0


@torch.no_grad()
def to_save(
    optimizer: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter], sharded: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Megatron's sharded tensors of the state, by parameter name and part of the state.

    `sharded` are those of the model. Collective over data-parallel ranks: with the distributed optimizer they put each
    tensor together.
    """
    optimizer = _single(optimizer)
    return {
        name: {
            part: make_sharded_optimizer_tensor(sharded[name], tensor, f"optimizer.state.{part}")
            for part, tensor in _whole_state(optimizer, parameter).items()
        }
        for name, parameter in parameters.items()
    }


def to_load(parameters: Mapping[str, torch.nn.Parameter], sharded: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `to_save` gives, with memory to load into."""
    return {
        name: {
            part: make_sharded_optimizer_tensor(
                sharded[name], torch.empty_like(parameter, dtype=torch.float32), f"optimizer.state.{part}"
            )
            for part in _parts(parameter)
        }
        for name, parameter in parameters.items()
    }


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    loaded: Mapping[str, Mapping[str, Tensor]],
    steps: int,
) -> None:
    """Make the state the one `to_load` was filled with, after `steps` steps. Options of the optimizer stay."""
    optimizer = _single(optimizer)
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    for name, parameter in parameters.items():
        for main, own in _own_part(optimizer, parameter):
            for part in _MOMENTS:
                inner.state[main][part].copy_(own(loaded[name][part]))
            if _MAIN in loaded[name]:
                main.copy_(own(loaded[name][_MAIN]))
    for group in inner.param_groups:
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            group["step"] = steps
            continue
        for main in group["params"]:
            inner.state[main]["step"] = torch.tensor(float(steps))


def forget(optimizer: MegatronOptimizer) -> None:
    """The state of a new optimizer, for the weights the model has now."""
    optimizer.optimizer.state.clear()
    for group in optimizer.optimizer.param_groups:
        group.pop("step", None)
    optimizer.reload_model_params()


def _single(optimizer: MegatronOptimizer) -> MegatronOptimizer:
    """Megatron chains one optimizer for each kind of weight; a model without experts has one kind."""
    if isinstance(optimizer, ChainedOptimizer):
        assert len(optimizer.chained_optimizers) == 1
        return optimizer.chained_optimizers[0]
    return optimizer


def _parts(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    return _MOMENTS if parameter.dtype == torch.float32 else (*_MOMENTS, _MAIN)


class _Range:
    """Some elements, in a row, of a parameter."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __call__(self, whole: Tensor) -> Tensor:
        return whole.view(-1)[self.start : self.end]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _own_part(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> Iterator[tuple[Tensor, Any]]:
    """What the inner optimizer steps for `parameter` on this rank, if anything, and the view of the parameter it is."""
    if not isinstance(optimizer, DistributedOptimizer):
        yield getattr(parameter, "main_param", parameter), _whole
    elif parameter in optimizer.model_param_group_index_map:
        group, index = optimizer.model_param_group_index_map[parameter]
        own = optimizer._get_model_param_range_map(parameter)["param"]
        yield optimizer.optimizer.param_groups[group]["params"][index], _Range(own.start, own.end)


def _whole_state(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    if not isinstance(optimizer, DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
        state = {part: optimizer.optimizer.state[main][part] for part in _MOMENTS}
        return {part: main if part == _MAIN else state[part] for part in _parts(parameter)}
    whole = {part: torch.zeros_like(parameter, dtype=torch.float32) for part in _parts(parameter)}
    for main, own in _own_part(optimizer, parameter):
        for part, tensor in whole.items():
            own(tensor).copy_(main if part == _MAIN else optimizer.optimizer.state[main][part])
    for tensor in whole.values():
        dist.all_reduce(tensor, group=optimizer.data_parallel_group)  # each element is 0 on all ranks but one
    return whole
