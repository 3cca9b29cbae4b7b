"""The optimizer's state by parameter, whole: the same in a checkpoint whoever keeps which part of it.

Megatron-Core has a form of its own for either optimizer, which the other cannot read, and with torch's AdamW three
faults in that of the distributed one: a new optimizer asserts that it has steps; loading fails for want of `step`; and
all parameters end up with one `step` tensor between them, which AdamW then raises once for each, so that the bias
correction is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from torch import Tensor

from exgrpo_megatron.policy.pieces import pieces

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
) -> dict[str, Any]:
    """Megatron's sharded tensors of the state, by parameter name and part of the state.

    `sharded` are those of the model. With the distributed optimizer each data-parallel rank gives what it keeps, as
    pieces of the parameter: nothing is put together or copied.
    """
    inner = _single(optimizer).optimizer

    def kept(main: Tensor, part: str) -> Tensor:
        return main.detach() if part == _MAIN else inner.state[main][part]

    return _sharded_state(_single(optimizer), parameters, sharded, kept)


def to_load(
    optimizer: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter], sharded: Mapping[str, Any]
) -> dict[str, Any]:
    """What `to_save` gives, with memory to load into: for what this rank keeps, and no more."""

    def empty(main: Tensor, _: str) -> Tensor:
        return torch.empty_like(main, dtype=torch.float32)

    return _sharded_state(_single(optimizer), parameters, sharded, empty)


@torch.no_grad()
def restore(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    loaded: Mapping[str, Mapping[str, Any]],
    steps: int,
) -> None:
    """Make the state the one `to_load` was filled with, after `steps` steps. Options of the optimizer stay."""
    optimizer = _single(optimizer)
    inner = optimizer.optimizer
    optimizer.init_state_fn(inner, optimizer.config)
    for name, parameter in parameters.items():
        for main, _ in _own_part(optimizer, parameter):
            for part in _parts(parameter):
                target = main if part == _MAIN else inner.state[main][part]
                target.copy_(_joined(loaded[name][part]).view_as(target))
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


def _own_part(
    optimizer: MegatronOptimizer, parameter: torch.nn.Parameter
) -> Iterator[tuple[Tensor, tuple[int, int] | None]]:
    """What the inner optimizer steps for `parameter` on this rank, if anything.

    With the distributed optimizer it is a flat tensor, and the elements (start, end) of the parameter are its; without,
    it is the whole, and None.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        yield getattr(parameter, "main_param", parameter), None
    elif parameter in optimizer.model_param_group_index_map:
        group, index = optimizer.model_param_group_index_map[parameter]
        own = optimizer._get_model_param_range_map(parameter)["param"]
        yield optimizer.optimizer.param_groups[group]["params"][index], (own.start, own.end)


def _sharded_state(
    optimizer: MegatronOptimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    sharded: Mapping[str, Any],
    tensor_of: Callable[[Tensor, str], Tensor],
) -> dict[str, Any]:
    """By parameter and part; `tensor_of` what is stepped, and the part."""
    state: dict[str, Any] = {}
    for name, parameter in parameters.items():
        for main, elements in _own_part(optimizer, parameter):
            state[name] = {}
            for part in _parts(parameter):
                key, tensor = f"optimizer.state.{part}", tensor_of(main, part)
                state[name][part] = (
                    make_sharded_optimizer_tensor(sharded[name], tensor, key)
                    if elements is None
                    else pieces(sharded[name], tuple(parameter.shape), tensor, elements[0], key)
                )
    return state


def _joined(loaded: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A loaded tensor, or its pieces one after another."""
    if isinstance(loaded, Tensor):
        return loaded
    return torch.cat([loaded[str(number)].view(-1) for number in range(len(loaded))])
