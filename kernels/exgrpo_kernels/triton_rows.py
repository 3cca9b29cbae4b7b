"""The device code of `triton_kernels` that reads logits, a row a program. Imported where triton is.

A row of logits is read in tiles of VECTORS x LANES x WIDTH columns: WIDTH neighbouring columns fill one 16-byte load,
LANES is the number of threads, and each thread has VECTORS loads under way at once. Statistics are kept for each lane
and joined once, at the end of the row, so that the loop over tiles has no exchange between threads.

Exponentials are base 2, the instruction the hardware has: `scale` is log2(e) / temperature throughout.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The maximum of no columns. Finite, so that differences of two maxima are never inf - inf."""
FLOOR = tl.constexpr(-1000.0)
"""2 to the power of anything below is 0 in float32: products with such an exponent take this finite one instead."""
EDGE = tl.constexpr(16)
"""Rows are read in whole blocks of this many columns, which is what the compiler knows to be aligned, and a rest."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["vocab_start", "valid"])
def statistics_kernel(
    logits,
    targets,
    statistics,
    row_stride,
    column_stride,
    vocab_start,
    valid,
    scale,
    VECTORS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a row: [maximum, sum, moment, logit of the target], see `triton_kernels.row_statistics`."""
    # 64 bits: rows * row_stride passes 2^31 from 14,135 rows of 151,936 columns on.
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    column = tl.load(targets + row).to(tl.int64) - vocab_start
    here = (column >= 0) & (column < valid)
    target = tl.load(logits + column * column_stride, mask=here, other=float("nan")).to(tl.float32)

    tile = VECTORS * LANES * WIDTH
    offsets = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    maxima = tl.full([LANES], LOWEST, tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    moments = tl.zeros([LANES], tl.float32)
    whole_tiles = valid // tile * tile
    # No mask here, and below one that ends at a multiple of EDGE: otherwise the loads would be of single columns.
    for start in range(0, whole_tiles, tile):
        values = ()
        for vector in tl.static_range(VECTORS):
            columns = start + vector * LANES * WIDTH + offsets
            values = values + (tl.load(logits + columns * column_stride).to(tl.float32),)  # noqa: RUF005
        maxima, sums, moments = _accumulate(values, maxima, sums, moments, scale, VECTORS)
    whole_blocks = valid // EDGE * EDGE
    for start in range(whole_tiles, whole_blocks, LANES * WIDTH):
        columns = start + offsets
        pointers = logits + columns * column_stride
        values = tl.load(pointers, mask=columns < whole_blocks, other=float("-inf")).to(tl.float32)
        maxima, sums, moments = _accumulate((values,), maxima, sums, moments, scale, 1)
    edge = whole_blocks + tl.arange(0, EDGE)
    rest = tl.load(logits + edge * column_stride, mask=edge < valid, other=float("-inf")).to(tl.float32)

    maximum = tl.maximum(tl.max(maxima, axis=0), tl.max(rest, axis=0))
    sums, moments = rescaled(sums, moments, maxima - maximum, scale)
    exponents = (rest - maximum) * scale
    weights = tl.exp2(exponents)
    total = tl.sum(sums, axis=0) + tl.sum(weights, axis=0)
    moment = tl.sum(moments, axis=0) + tl.sum(weights * tl.maximum(exponents, FLOOR), axis=0)
    statistics += row * 4
    tl.store(statistics, maximum)
    tl.store(statistics + 1, total)
    tl.store(statistics + 2, moment * LN2)
    tl.store(statistics + 3, target)


@triton.jit(do_not_specialize=["num_rows", "vocab_start", "valid", "num_columns"])
def gradient_kernel(
    logits,
    targets,
    coefficients,
    num_rows,
    row_stride,
    column_stride,
    vocab_start,
    valid,
    num_columns,
    scale,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program a row: the gradient of the logits, in their place; 0 in columns from `valid` on."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    coefficients += row
    maximum = tl.load(coefficients)
    log2_sum = tl.load(coefficients + num_rows)
    base = tl.load(coefficients + 2 * num_rows)
    slope = tl.load(coefficients + 3 * num_rows)
    target_gradient = tl.load(coefficients + 4 * num_rows)
    # `base` is all of the entropy's coefficient where log p = -H, so all three are 0 only where both gradients are.
    # Of such a row nothing is read, and zeros are written.
    readable = tl.where((base == 0) & (slope == 0) & (target_gradient == 0), 0, valid)
    # 32 bits, as columns of one row are.
    target = tl.load(targets + row).to(tl.int64) - vocab_start
    target = tl.where((target >= 0) & (target < valid), target, -1).to(tl.int32)

    offsets = tl.arange(0, TILE)
    whole_tiles = readable // TILE * TILE
    for start in range(0, whole_tiles, TILE):
        columns = start + offsets
        pointers = logits + columns * column_stride
        gradient = _gradient(tl.load(pointers), columns, target, maximum, log2_sum, base, slope, target_gradient, scale)
        tl.store(pointers, gradient)
    offsets = tl.arange(0, TAIL)
    whole_blocks = readable // EDGE * EDGE
    for start in range(whole_tiles, whole_blocks, TAIL):
        columns = start + offsets
        pointers = logits + columns * column_stride
        inside = columns < whole_blocks
        values = tl.load(pointers, mask=inside)
        gradient = _gradient(values, columns, target, maximum, log2_sum, base, slope, target_gradient, scale)
        tl.store(pointers, gradient, mask=inside)
    edge = whole_blocks + tl.arange(0, EDGE)
    pointers = logits + edge * column_stride
    values = tl.load(pointers, mask=edge < readable, other=0.0)
    gradient = _gradient(values, edge, target, maximum, log2_sum, base, slope, target_gradient, scale)
    tl.store(pointers, tl.where(edge < readable, gradient, 0.0), mask=edge < num_columns)
    padding = whole_blocks + EDGE
    padding_blocks = num_columns // EDGE * EDGE
    for start in range(padding, padding_blocks, TAIL):
        columns = start + offsets
        zeros = tl.zeros([TAIL], logits.dtype.element_ty)
        tl.store(logits + columns * column_stride, zeros, mask=columns < padding_blocks)
    edge = padding_blocks + tl.arange(0, EDGE)
    zeros = tl.zeros([EDGE], logits.dtype.element_ty)
    tl.store(logits + edge * column_stride, zeros, mask=(edge >= padding) & (edge < num_columns))


@triton.jit
def _accumulate(values, maxima, sums, moments, scale, VECTORS: tl.constexpr):
    """Statistics of each lane with VECTORS more [LANES, WIDTH] values; exponents are relative to the lane's maximum."""
    new_maxima = maxima
    for vector in tl.static_range(VECTORS):
        new_maxima = tl.maximum(new_maxima, tl.max(values[vector], axis=1))
    sums, moments = rescaled(sums, moments, maxima - new_maxima, scale)
    for vector in tl.static_range(VECTORS):
        exponents = (values[vector] - new_maxima[:, None]) * scale
        weights = tl.exp2(exponents)
        sums += tl.sum(weights, axis=1)
        # A logit of -inf has weight 0, and its share of the moment is the limit 0, not 0 * inf.
        moments += tl.sum(weights * tl.maximum(exponents, FLOOR), axis=1)
    return new_maxima, sums, moments


@triton.jit
def rescaled(sums, moments, difference, scale):
    """Sum and moment (of exponents in base 2) about another maximum; `difference` is the old one minus the new one."""
    shift = tl.maximum(difference * scale, FLOOR)
    factor = tl.exp2(shift)
    return sums * factor, (moments + shift * sums) * factor


@triton.jit
def _gradient(values, columns, target, maximum, log2_sum, base, slope, target_gradient, scale):
    """p (base + slope log2 p), and more at the target; in the type of the logits."""
    exponents = (values.to(tl.float32) - maximum) * scale - log2_sum
    gradient = tl.exp2(exponents) * (base + slope * tl.maximum(exponents, FLOOR))
    return (gradient + tl.where(columns == target, target_gradient, 0.0)).to(values.dtype)
