"""Which processes share what: Megatron's order of ranks, in arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.errors import ConfigError

Kind = Literal["tensor", "context", "data", "pipeline"]

ORDER: tuple[Kind, ...] = ("tensor", "context", "data", "pipeline")
"""Neighbouring ranks differ in the first of these; Megatron calls the order tp-cp-ep-dp-pp."""


@dataclass(frozen=True)
class Ranks:
    """How many ranks share each thing; their product is the number of processes."""

    tensor: int
    context: int
    data: int
    pipeline: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    def groups(self, *kinds: Kind) -> list[list[int]]:
        """The groups of ranks that differ in `kinds` alone, each ascending, by their first rank."""
        inner = [self._steps(kind) for kind in reversed(ORDER) if kind in kinds]
        outer = [self._steps(kind) for kind in reversed(ORDER) if kind not in kinds]
        return [[sum(base) + sum(step) for step in product(*inner)] for base in product(*outer)]

    def of_stage(self, stage: int) -> range:
        """The ranks of a pipeline stage, which are neighbours."""
        size = self.world_size // self.pipeline
        return range(stage * size, (stage + 1) * size)

    def _steps(self, kind: Kind) -> range:
        stride = 1
        for other in ORDER[: ORDER.index(kind)]:
            stride *= getattr(self, other)
        return range(0, stride * getattr(self, kind), stride)


def lay_out(world_size: int, layout: MegatronConfig) -> Ranks:
    """The ranks of so many processes; raises ConfigError where the layout does not divide them."""
    tensor, pipeline = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    context = layout.context_parallel_size
    if world_size % layout.model_parallel_size:
        raise ConfigError(
            "policy.megatron_cfg: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = "
            f"{tensor} * {pipeline} * {context} = {layout.model_parallel_size} does not divide the {world_size} "
            f"processes"
        )
    return Ranks(tensor, context, world_size // layout.model_parallel_size, pipeline)
