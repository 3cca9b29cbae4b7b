"""The weights of a model that ranks share, whole and under their Hugging Face names, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.hf_folder import HFReader
from exgrpo_conversion.mapping import OUTPUT_LAYER, is_sharded, to_hf, unshard
from exgrpo_megatron.policy.model import ResponseModel, global_parameters, tensors_other_than


@dataclass(frozen=True)
class _Entry:
    """One parameter of the whole model, as the tensor-parallel ranks of its stage hold it."""

    name: str
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightExport:
    """Streams the weights of a model of `architecture`, of which this rank has `chunks`.

    Made and used by all ranks that share the model.
    """

    def __init__(self, chunks: Sequence[ResponseModel], architecture: Architecture) -> None:
        self._architecture, self._models = architecture, chunks
        self._chunks = [dict(global_parameters(chunk)) for chunk in chunks]
        self._own = dict(chain.from_iterable(chunk.items() for chunk in self._chunks))
        self._device = next(iter(self._own.values())).device
        self._plan = self._whole_model()

    def other_tensors(self, folder: Path, on_progress: Callable[[], None]) -> list[str]:
        """The tensors of a Hugging Face folder that do not make this rank's parameters; nothing is exchanged.
        `on_progress` is called a parameter."""
        with HFReader(folder) as reader:
            return tensors_other_than(self._models, self._architecture, reader, None, on_progress)

    def manifest(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight that iterating yields, in that order; nothing is exchanged."""
        ranks = mpu.get_tensor_model_parallel_world_size()
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self._plan:
            part = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            whole = unshard(entry.name, [part] * ranks) if is_sharded(entry.name) else part
            shapes.update({name: tuple(tensor.shape) for name, tensor in to_hf(self._architecture, entry.name, whole)})
        return shapes

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, first layer to last; each tensor is a copy the caller owns.

        Collective: every rank must take everything. One parameter at a time leaves its stage for all others, and
        its parts, if tensor-parallel ranks share it, are put together on each.
        """
        for entry in self._plan:
            whole = self._gathered(entry, self._from_stage(entry))
            for name, tensor in to_hf(self._architecture, entry.name, whole):
                yield name, tensor.clone()

    def _whole_model(self) -> list[_Entry]:
        stage = mpu.get_pipeline_model_parallel_rank()
        own = [
            [_Entry(name, stage, tuple(tensor.shape), tensor.dtype) for name, tensor in chunk.items()]
            for chunk in self._chunks
        ]
        stages: list[list[list[_Entry]]] = [own]
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            stages = [[] for _ in range(mpu.get_pipeline_model_parallel_world_size())]
            dist.all_gather_object(stages, own, group=mpu.get_pipeline_model_parallel_group())
        # The output layer of a tied model is a copy of the embedding, which has its own name.
        skipped = {OUTPUT_LAYER} if self._architecture.tied else set()
        # The first chunks of all stages come before the second ones.
        chunks = chain.from_iterable(zip(*stages, strict=True))
        return [entry for entries in chunks for entry in entries if entry.name not in skipped]

    def _from_stage(self, entry: _Entry) -> Tensor:
        """This tensor-parallel rank's part of the parameter, whichever stage has it."""
        group = mpu.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) == 1:
            return self._own[entry.name].detach()
        if entry.stage == mpu.get_pipeline_model_parallel_rank():
            part = self._own[entry.name].detach().contiguous()
        else:
            part = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        dist.broadcast(part, src=dist.get_global_rank(group, entry.stage), group=group)
        return part

    def _gathered(self, entry: _Entry, part: Tensor) -> Tensor:
        group = mpu.get_tensor_model_parallel_group()
        if dist.get_world_size(group) == 1 or not is_sharded(entry.name):
            return part
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return unshard(entry.name, parts)
