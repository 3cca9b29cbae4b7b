"""Attention of packed sequences against attention of each alone, written out with softmax."""

from __future__ import annotations

import pytest
import torch

from exgrpo_megatron.policy.attention import causal_attention


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[positions, heads, head_dim]; every head of keys and values serves as many heads of queries."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("lengths", [[7], [5, 1, 9], [1, 1, 1]])
def test_packed_sequences_do_not_see_one_another(lengths: list[int]) -> None:
    """Results and gradients to 1e-12 in float64."""
    torch.manual_seed(0)
    packed = [torch.randn(sum(lengths), 1, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(sum(lengths), 1, 4, 8, dtype=torch.float64)

    result = causal_attention(*packed, lengths, scale=0.3)
    mine = torch.autograd.grad((result * upstream).sum(), packed)

    pieces = zip(*(tensor[:, 0].split(lengths) for tensor in packed), strict=True)
    expected = torch.cat([dense(*piece, 0.3) for piece in pieces])[:, None]
    theirs = torch.autograd.grad((expected * upstream).sum(), packed)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    for gradient, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-12, rtol=0)
