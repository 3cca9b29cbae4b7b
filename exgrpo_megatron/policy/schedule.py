"""Megatron's forward(-backward) schedule over micro-batches, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from exgrpo_megatron.policy.batch import MicroBatch
from exgrpo_megatron.policy.distributed import from_last_stage
from exgrpo_megatron.policy.model import sum_gradients

Outputs = dict[str, Tensor]
"""What one micro-batch leaves behind, by name; no gradients."""
OutputFunction = Callable[..., object]
"""(micro-batch, hidden states [1, tokens, hidden]) to what Megatron's schedule expects of its loss function; called on
the last pipeline stage. Its outputs are of the response tokens that are predicted here, or sums over these. It is also
given micro-batches without tokens, which must have a gradient, of 0, for every weight that others have one for."""


def run(
    chunks: list[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    function: OutputFunction,
    *,
    forward_only: bool,
) -> list[Outputs]:
    """Each micro-batch through the model; the outputs of all its response tokens, the same on all ranks that share the
    model.

    With gradients, which are summed over micro-batches, context-parallel and data-parallel ranks, unless
    `forward_only`. The ranks that share the model must have the same micro-batches (context-parallel ranks: their
    own part of them). Data-parallel ranks may have different ones, or none; each must call, because one with gradients,
    or with weights still on their way, waits for the others.
    """
    if not batches:
        _take_part(chunks, forward_only=forward_only)
        return []
    padded = _padded(batches, len(chunks))

    # Megatron's wrapper of models in lower precision would else hand out float32.
    options = {"fp32_output": False} if chunks[0].config.bf16 else {}

    def forward(iterator: Iterator[MicroBatch], module: torch.nn.Module) -> tuple[Tensor, OutputFunction]:
        batch = next(iterator)
        packing = _packed_seq_params(batch)
        hidden = module(
            batch.tokens, None, None, loss_mask=batch.predicts_response, packed_seq_params=packing, **options
        )
        return hidden, partial(function, batch)

    rows = batches[0].tokens.shape[0]
    outputs = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(padded) for _ in chunks] if len(chunks) > 1 else iter(padded),
        model=chunks,
        num_microbatches=len(padded),
        seq_length=batches[0].num_positions // rows,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    own = outputs[: len(batches)]
    return from_last_stage(_of_all_tokens(batches, own) if own else own)


def receive_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait until the weights of the last optimiser step are here; collective over data-parallel ranks.

    With overlap_param_gather they come during the next forward pass, in this order.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for bucket_group in reversed(chunk.bucket_groups):
                bucket_group.finish_param_sync()


def _padded(batches: Sequence[MicroBatch], chunks: int) -> list[MicroBatch]:
    """The interleaved schedule takes as many micro-batches as there are stages at a time: the last round is filled up.

    What it is filled up with has no members and no response tokens, and so a gradient of exactly 0.
    """
    if chunks == 1:
        return list(batches)
    last = batches[-1]
    filler = replace(
        last,
        members=(),
        response_lengths=(),
        predicts_response=torch.zeros_like(last.predicts_response),
        targets=last.targets[:0],
        own=None,
    )
    return [*batches, *[filler] * (-len(batches) % mpu.get_pipeline_model_parallel_world_size())]


def _packed_seq_params(batch: MicroBatch) -> PackedSeqParams | None:
    """What RoPE and attention need of a packed row; padding counts as the end of the sequence it stands behind."""
    if batch.packed_lengths is None:
        return None
    ends = np.cumsum([0, *batch.packed_lengths], dtype=np.int32)
    boundaries = torch.from_numpy(ends).to(batch.tokens.device)
    longest = max(batch.packed_lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _of_all_tokens(batches: Sequence[MicroBatch], outputs: Sequence[Outputs]) -> list[Outputs]:
    """Outputs of context-parallel ranks put together: those of tokens in the tokens' order, sums added up."""
    found = [{name: tensor.cpu() for name, tensor in output.items()} for output in outputs]
    group = mpu.get_context_parallel_group()
    if dist.get_world_size(group) == 1:
        return found
    ranks: list[Any] = [None] * dist.get_world_size(group)
    own = [None if batch.own is None else batch.own.cpu() for batch in batches]
    dist.all_gather_object(ranks, list(zip(own, found, strict=True)), group=group)
    return [_put_together(batch.num_tokens, parts) for batch, *parts in zip(batches, *ranks, strict=True)]


def _put_together(num_tokens: int, parts: Sequence[tuple[Tensor, Outputs]]) -> Outputs:
    whole: Outputs = {}
    for name, first in parts[0][1].items():
        if first.ndim == 0:
            whole[name] = torch.stack([output[name] for _, output in parts]).sum()
            continue
        whole[name] = first.new_empty(num_tokens)
        for own, output in parts:
            whole[name][own] = output[name]
    return whole


def _take_part(chunks: list[DistributedDataParallel], *, forward_only: bool) -> None:
    """Give the data-parallel ranks that have micro-batches what they wait for: weights, and a gradient of zero."""
    receive_weights(chunks)
    if not forward_only:
        sum_gradients(chunks)
