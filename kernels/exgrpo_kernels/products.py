"""The three matrix products of an output layer, with float32 logits and a float32 weight gradient in every precision.

With weights of 16 bits a GPU multiplies in 16 and adds in 32 bits; a CPU multiplies in float32, some columns of the
weight at a time, so that no float32 copy of the whole weight is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

# Of a 16-bit weight on a CPU, this many elements at a time are converted to float32: 16 MiB.
_CONVERTED_ELEMENTS = 1 << 22


def write_logits(
    out: Float[Tensor, "rows columns"], hidden: Float[Tensor, "rows hidden"], weight: Float[Tensor, "columns hidden"]
) -> None:
    """`hidden @ weight.T`, never rounded below the precision of `out`."""
    if weight.dtype == out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif out.is_cuda:
        torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for columns, part in _converted(weight, out.dtype):
            torch.mm(hidden, part.t(), out=out[:, columns])


def write_hidden_gradient(
    out: Float[Tensor, "rows hidden"], gradient: Float[Tensor, "rows columns"], weight: Float[Tensor, "columns hidden"]
) -> None:
    """`gradient @ weight`; `gradient` is as `for_products` gave it."""
    if gradient.dtype == weight.dtype == out.dtype:
        torch.mm(gradient, weight, out=out)
    elif out.is_cuda:
        out.copy_(gradient @ weight)
    else:
        total = gradient.new_zeros(out.shape)
        for columns, part in _converted(weight, gradient.dtype):
            total.addmm_(gradient[:, columns], part)
        out.copy_(total)


def add_weight_gradient(
    total: Float[Tensor, "columns hidden"],
    gradient: Float[Tensor, "rows columns"],
    hidden: Float[Tensor, "rows hidden"],
    *,
    first: bool,
) -> None:
    """Add `gradient.T @ hidden` to `total`, which is not read where this is the `first` to be added."""
    if gradient.is_cuda and gradient.dtype != total.dtype:
        hidden = hidden.to(gradient.dtype)
        if first:
            torch.mm(gradient.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, gradient.t(), hidden.to(total.dtype), beta=0.0 if first else 1.0, out=total)


def for_products(
    gradient: Float[Tensor, "rows columns"], weight: Float[Tensor, "columns hidden"]
) -> Float[Tensor, "rows columns"]:
    """The gradient of the logits in the precision that the two products of the backward pass read it in."""
    return gradient.to(weight.dtype) if gradient.is_cuda else gradient


def _converted(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    columns, hidden = weight.shape
    step = max(1, _CONVERTED_ELEMENTS // max(1, hidden))
    for start in range(0, columns, step):
        part = slice(start, start + step)
        yield part, weight[part].to(dtype)
