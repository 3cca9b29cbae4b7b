"""Bytes of training on one rank of each pipeline stage: weights, gradients, optimizer, activations, loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.plan.activations import TokenLayout, boundary_bytes, head_bytes, layer_bytes, loss_bytes
from exgrpo_megatron.plan.buffers import Buffer, overlap_bucket_size, plain_buffer, shared_buffer
from exgrpo_megatron.plan.parameters import Parameter, Stage
from exgrpo_megatron.plan.ranks import Ranks

_FLOAT32, _MOMENTS = 4, 2
_FP8_COPIES = 2
"""Bytes a number: products of the forward pass want rows in a row, of the backward pass columns."""


@dataclass(frozen=True)
class HeldBytes:
    """What a rank of a stage holds all the time; of its data-parallel ranks, the one with the most."""

    weights: int
    gradients: int
    """Float32, whole on every data-parallel rank."""
    optimizer: int
    """Two moments in float32, and for weights of lower precision their float32 originals."""
    fp8_weights: int = 0
    """Transformer Engine's FP8 copies of the layers' matrices, by rows and by columns."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.fp8_weights


@dataclass(frozen=True)
class StepBytes:
    """What passes over a micro-batch take beside that, at most."""

    kept: int
    """Activations between forward and backward pass, nothing recomputed."""
    recomputed: int
    """The same with activation_checkpointing."""
    loss: int
    """Of the last stage: logits, and the gradients made with them."""
    scoring: int
    """Of a forward-only pass: logits and one layer's work."""


def held_bytes(stage: Stage, ranks: Ranks, layout: MegatronConfig, number_bytes: int) -> HeldBytes:
    """Exactly what Megatron-Core allocates, FP8 copies by arithmetic; `number_bytes` is the size of a weight."""
    sharing = ranks.data * ranks.context
    buffers = [
        _buffer(chunk, layout, sharing, bucketed=stage.index == index == 0) for index, chunk in enumerate(stage.chunks)
    ]
    state = _FLOAT32 * (_MOMENTS + (1 if number_bytes != _FLOAT32 else 0))
    if layout.optimizer.use_distributed_optimizer:
        elements = sum(buffer.elements for buffer in buffers)
        owned = max(sum(buffer.owned(rank, sharing) for buffer in buffers) for rank in range(sharing))
    else:
        elements = owned = stage.elements
    copies = _FP8_COPIES * _matrix_elements(stage) if layout.fp8_cfg.enabled else 0
    return HeldBytes(elements * number_bytes, elements * _FLOAT32, owned * state, copies)


def _matrix_elements(stage: Stage) -> int:
    return sum(
        parameter.elements
        for chunk in stage.chunks
        for parameter in chunk
        if ".linear_" in parameter.name and parameter.name.endswith(".weight")
    )


def step_bytes(
    arch: Architecture, stage: Stage, ranks: Ranks, train: TokenLayout, score: TokenLayout, micro_batches: int
) -> StepBytes:
    """Of an optimiser step of so many micro-batches a data-parallel rank, and of the passes that only score."""
    passes = passes_in_flight(stage, ranks.pipeline, micro_batches)
    layers = passes * stage.num_layers // len(stage.chunks)
    layer, boundary = layer_bytes(arch, train), boundary_bytes(arch, train)
    between = (passes * boundary if not stage.is_last else 0) + (head_bytes(arch, train) if stage.is_last else 0)
    return StepBytes(
        kept=layers * layer + between,
        recomputed=layers * boundary + layer + between,
        loss=loss_bytes(arch, train, backward=True) if stage.is_last else 0,
        scoring=layer_bytes(arch, score) + (loss_bytes(arch, score, backward=False) if stage.is_last else 0),
    )


def passes_in_flight(stage: Stage, pipeline: int, micro_batches: int) -> int:
    """Forward passes of a chunk that wait for their backward pass, at most (one forward, one backward in turn).

    Without virtual stages a stage is ahead by the stages behind it; interleaved, by twice as many, and by a whole
    round for each further chunk (section 2.2 of arXiv:2104.04473); its last round of micro-batches is filled up.
    """
    behind, chunks = pipeline - 1 - stage.index, len(stage.chunks)
    if chunks > 1:
        micro_batches = -(-micro_batches // pipeline) * pipeline
    ahead = behind if chunks == 1 else 2 * behind + (chunks - 1) * pipeline
    return min(ahead + 1, micro_batches * chunks)


def _buffer(parameters: Sequence[Parameter], layout: MegatronConfig, sharing: int, *, bucketed: bool) -> Buffer:
    if not layout.optimizer.use_distributed_optimizer:
        return plain_buffer(parameters)
    exchange = layout.distributed_data_parallel_config
    size = exchange.bucket_size or overlap_bucket_size(sharing)
    return shared_buffer(parameters, sharing, size if exchange.overlap_grad_reduce and bucketed else None)
