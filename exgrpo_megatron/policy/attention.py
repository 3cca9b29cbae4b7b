"""Causal self-attention in plain torch: padded or packed rows, also where context-parallel ranks share positions.

Megatron-Core's own attention refuses packed rows and context parallelism without Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from exgrpo_megatron.policy.grouping import zigzag

# torch 2.13 warns of the names that older ones have.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class CausalAttention(MegatronModule):
    """For the core-attention slot of a layer.

    Padding stands behind the real positions of a sequence, so the causal mask alone keeps these from seeing it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,  # noqa: ARG002 (Megatron passes it)
        attn_mask_type: Any,  # noqa: ARG002
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert (attention_type, config.attention_dropout) == ("self", 0)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[positions, batch, heads, head_dim] to [positions, batch, heads * head_dim]; keys and values have kv_heads.

        Packed: no batch dimension on either side, and `packed_seq_params` counts the positions of each sequence on all
        context-parallel ranks together. With these, every rank holds of each sequence what `grouping.zigzag` says.
        """
        assert attention_mask is None
        assert attention_bias is None
        if packed_seq_params is None:
            lengths = [query.shape[0] * mpu.get_context_parallel_world_size()]
            return causal_attention(query, key, value, lengths, self._scale, self._group()).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return causal_attention(query, key, value, lengths, self._scale, self._group()).flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}

    @staticmethod
    def _group() -> dist.ProcessGroup | None:
        return mpu.get_context_parallel_group() if mpu.get_context_parallel_world_size() > 1 else None


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Attention of each position to itself and those before it in its sequence; all tensors are [positions, batch,
    heads (or kv_heads), head_dim], and sequences of `lengths` follow one another along the positions.

    With a `group`, its ranks hold the positions that `grouping.zigzag` gives them of these lengths, and get the result
    at these. Keys and values of all are gathered, for their number is that of the kv_heads; of the work of a sequence
    each rank has the same share.
    """
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    if group is not None:
        key, value = _whole_sequences(key, value, lengths, group)
    attended = []
    own_lengths = [length // size for length in lengths]
    for queries, keys, values in zip(
        query.split(own_lengths), key.split(list(lengths)), value.split(list(lengths)), strict=True
    ):
        for part, end in _parts(queries, size, rank):
            attended.append(_attend(part, keys[:end], values[:end], scale))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _parts(queries: Tensor, size: int, rank: int) -> list[tuple[Tensor, int]]:
    """The queries of one sequence in stretches of neighbouring positions, each with the position behind its last."""
    if size == 1:
        return [(queries, queries.shape[0])]
    front, back = queries.chunk(2)
    part = front.shape[0]
    return [(front, (rank + 1) * part), (back, (2 * size - rank) * part)]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Of the last positions of a stretch to the whole of it."""
    mask = None
    if query.shape[0] < key.shape[0]:
        shape = (query.shape[0], key.shape[0])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])
    # Sequence by sequence in memory: for strided positions torch's kernel for CPUs takes longer than with these copies.
    query, key, value = (tensor.transpose(0, 1).contiguous().transpose(1, 2) for tensor in (query, key, value))
    attended = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.permute(2, 0, 1, 3)


def _whole_sequences(
    key: Tensor, value: Tensor, lengths: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values of all positions, in order, from each rank's."""
    size = dist.get_world_size(group)
    held = np.concatenate([zigzag(lengths, size, rank) for rank in range(size)])
    order = torch.from_numpy(held.argsort()).to(key.device)
    both = _Gathered.apply(torch.stack([key, value], dim=1), order, group)
    return both[:, 0], both[:, 1]


class _Gathered(torch.autograd.Function):
    """Rows of all ranks of a group, one rank's after the other's, then in the order of the indices `order`.

    Backward gives each rank the sum, over ranks, of the gradients of the rows it holds.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        gathered = own.new_empty((len(order), *own.shape[1:]))
        _all_gather(gathered, own.contiguous(), group=group)
        return gathered.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        gathered = torch.empty_like(grad, memory_format=torch.contiguous_format).index_copy_(0, order, grad)
        own = grad.new_empty((len(order) // dist.get_world_size(ctx.group), *grad.shape[1:]))
        _reduce_scatter(own, gathered, group=ctx.group)
        return own, None, None
