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


def conversion_buffer(weight: Float[Tensor, "columns hidden"], dtype: torch.dtype) -> Float[Tensor, " elements"]:
    """Room for the part of a weight that is converted to `dtype` at a time; empty where none is.

    One for all chunks: what is allocated anew for each leaves holes of its size between the chunks' results.
    """
    if weight.is_cuda or weight.dtype == dtype:
        return weight.new_empty(0, dtype=dtype)
    return weight.new_empty(min(weight.numel(), max(_CONVERTED_ELEMENTS, weight.shape[1])), dtype=dtype)


def write_logits(
    out: Float[Tensor, "rows columns"],
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "columns hidden"],
    buffer: Float[Tensor, " elements"],
) -> None:
    """`hidden @ weight.T`, never rounded below the precision of `out`; `buffer` is the `conversion_buffer`."""
    if weight.dtype == out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif out.is_cuda:
        torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for columns, part in _converted(weight, buffer):
            torch.mm(hidden, part.t(), out=out[:, columns])


def write_hidden_gradient(
    out: Float[Tensor, "rows hidden"],
    gradient: Float[Tensor, "rows columns"],
    weight: Float[Tensor, "columns hidden"],
    buffer: Float[Tensor, " elements"],
) -> None:
    """`gradient @ weight`; `gradient` is as `for_products` gave it, and `buffer` the `conversion_buffer`."""
    if gradient.dtype == weight.dtype == out.dtype:
        torch.mm(gradient, weight, out=out)
    elif out.is_cuda:
        out.copy_(gradient @ weight)
    else:
        total = gradient.new_zeros(out.shape)
        for columns, part in _converted(weight, buffer):
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
    return with_same_strides(gradient, weight.dtype) if gradient.is_cuda else gradient


def with_same_strides(rows: Float[Tensor, "rows columns"], dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
    """The rows in `dtype`, as far apart as they are: of some columns of wider rows `to` would make narrow ones, which
    begin anywhere, and cuBLAS's fast kernels want rows of 16 bits to begin at multiples of 16 bytes."""
    if rows.dtype == dtype:
        return rows
    wide = rows.new_empty(rows.shape[0], max(rows.stride(0), rows.shape[1]), dtype=dtype)
    return wide[:, : rows.shape[1]].copy_(rows)


def _converted(weight: Tensor, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the weight after the other, converted into the buffer; all at once if they are as it is."""
    columns, hidden = weight.shape
    if weight.dtype == buffer.dtype:
        yield slice(0, columns), weight
        return
    step = max(1, len(buffer) // max(1, hidden))
    for start in range(0, columns, step):
        given = weight[start : start + step]
        yield slice(start, start + step), buffer[: given.numel()].view_as(given).copy_(given)
