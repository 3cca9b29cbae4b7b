"""The loss from logits on a GPU, in Triton: statistics of the columns that are here, then loss and gradient in place.

    statistics = row_statistics(logits, ...)                    # reads the logits once
    parts = all_gather(statistics)                              # [ranks, rows, 4]: all that ranks exchange
    loss_and_gradient(logits, parts, ...)                       # reads and writes the logits once

`logits` are [rows, columns] of bfloat16, float16 or float32 with any strides; everything about a row is float32. Column
`c` of a rank is column `vocab_start + c` of the vocabulary, targets count in the vocabulary, and of the columns that
are here the first `valid` are no padding (possibly none). Numbers are those of `reference`, which defines them.

Needs triton 3.6 or newer, and a GPU, or TRITON_INTERPRET=1 in the environment before triton is imported.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_kernels import triton_rows, triton_tokens
from exgrpo_kernels.reference import shaping_factor
from exgrpo_kernels.types import TokenLoss

if TYPE_CHECKING:
    from exgrpo_kernels.reference import Objective, Shaping
    from exgrpo_kernels.types import LossInputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS_PER_PROGRAM = 128
"""Tokens of one program where no logits are read: one a thread."""
_FIELDS = 5  # numbers of a row that the gradient needs, see triton_tokens
# The two of f(w) are one to the kernel, which is told their factor.
_SHAPINGS: dict[Shaping, str] = {
    "ratio": "ratio",
    "normalized_ratio": "ratio",
    "none": "none",
    "sqrt": "sqrt",
    "clip": "clip",
    "log_prob": "log_prob",
}


@dataclass(frozen=True)
class Tile:
    """How a row is read, see `triton_rows`: `vectors * 32 * num_warps * 16` bytes at a time."""

    vectors: int
    num_warps: int

    def columns(self, itemsize: int) -> int:
        """Columns of one tile."""
        return self.vectors * 32 * self.num_warps * (16 // itemsize)


TILES = (Tile(vectors=4, num_warps=8), Tile(vectors=2, num_warps=4), Tile(vectors=1, num_warps=4))
"""From large to small vocabularies."""


def row_statistics(
    logits: Float[Tensor, "rows columns"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    valid: int,
    vocab_start: int,
) -> Float[Tensor, "rows 4"]:
    """Of each row, over the first `valid` columns: (m, s, e, t), the part of these columns in log-prob and entropy.

    m: largest logit, not divided by the temperature, so that it is exact; the lowest float32 where there are none.
    s: sum of exp(z - m / temperature), z = logits / temperature. e: sum of exp(z - m / T)(z - m / T).
    t: logit of the target, not divided; NaN where the target is not here. If it is nowhere, its log-prob is NaN.

    Raises:
        ValueError: dtype, device, temperature, `valid` or shapes are not as said here.
    """
    _check(logits, targets, temperature, valid)
    rows = logits.shape[0]
    statistics = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    if rows:
        tile = tile_for(logits, valid)
        with _device_of(logits):
            triton_rows.statistics_kernel[(rows,)](
                logits,
                targets.contiguous(),
                statistics,
                logits.stride(0),
                logits.stride(1),
                vocab_start,
                valid,
                _scale(temperature),
                VECTORS=tile.vectors,
                LANES=32 * tile.num_warps,
                WIDTH=16 // logits.element_size(),
                num_warps=tile.num_warps,
            )
    return statistics


def logprob_entropy(
    statistics: Float[Tensor, "ranks rows 4"], *, temperature: float
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Log-prob of each target and entropy (nats) from the statistics of all ranks."""
    rows = _check_statistics(statistics)
    logprobs, entropies = statistics.new_empty(2, rows)
    _merge(statistics, temperature, logprobs, entropies, None, None, None)
    return logprobs, entropies


def loss_and_gradient(
    logits: Float[Tensor, "rows columns"],
    statistics: Float[Tensor, "ranks rows 4"],
    targets: Int[Tensor, " rows"],
    inputs: LossInputs,
    objective: Objective,
    *,
    temperature: float,
    valid: int,
    vocab_start: int,
    write_gradient: bool,
) -> TokenLoss:
    """The loss of each token; with `write_gradient`, its gradient takes the place of the logits (exactly 0 in padding).

    Fresh and replayed tokens may be mixed. A token whose weights are 0 has loss 0 and gradient 0, whatever its logits.
    The gradient is that of the sum of losses; an upstream factor is the caller's.

    Raises:
        ValueError: as `row_statistics`, or `logits` cannot be written in place since rows overlap.
    """
    _check(logits, targets, temperature, valid)
    rows = _check_statistics(statistics, logits)
    floats = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    flags = torch.empty(2, rows, dtype=torch.bool, device=logits.device)
    coefficients = torch.empty(_FIELDS, rows, dtype=torch.float32, device=logits.device)
    result = TokenLoss(*floats.unbind(), *flags.unbind())
    if rows:
        with _device_of(logits):
            triton_tokens.loss_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
                statistics.contiguous(),
                *_per_token(inputs),
                *floats.unbind(),
                *flags.view(torch.uint8).unbind(),
                coefficients,
                statistics.shape[0],
                rows,
                1 / temperature,
                _scale(temperature),
                # Floats whatever they were given as: integers would be compiled in.
                float(1 - objective.clip_min),
                float(1 + objective.clip_max),
                float(objective.shaping_beta),
                float(shaping_factor(objective.shaping_beta, objective.shaping)),
                float(objective.max_abs_log_ratio),
                NLL=objective.kind == "nll",
                CLIP=objective.clip,
                SHAPING=_SHAPINGS[objective.shaping],
                HAS_ENTROPY=inputs.entropy_weights is not None,
                ROWS=ROWS_PER_PROGRAM,
            )
    if write_gradient:
        _write_gradient(logits, coefficients, targets, temperature, valid, vocab_start)
    return result


def write_gradient(
    logits: Float[Tensor, "rows columns"],
    statistics: Float[Tensor, "ranks rows 4"],
    targets: Int[Tensor, " rows"],
    logprob_gradients: Float[Tensor, " rows"],
    entropy_gradients: Float[Tensor, " rows"] | None,
    *,
    temperature: float,
    valid: int,
    vocab_start: int,
) -> None:
    """Put the gradient of the logits in their place, given that of each log-prob and entropy.

    For losses that are not `loss_and_gradient`'s, and for a recomputation in the backward pass. None: no gradient of
    the entropies. A row whose two are 0 gets 0, whatever its logits.

    Raises:
        ValueError: as `loss_and_gradient`.
    """
    _check(logits, targets, temperature, valid)
    rows = _check_statistics(statistics, logits)
    coefficients = torch.empty(_FIELDS, rows, dtype=torch.float32, device=logits.device)
    _merge(statistics, temperature, None, None, logprob_gradients, entropy_gradients, coefficients)
    _write_gradient(logits, coefficients, targets, temperature, valid, vocab_start)


def tile_for(logits: Tensor, columns: int) -> Tile:
    """The largest tile of which a row of `columns` has at least two; the smallest where it has not.

    Nothing is tried out at run time. What a row needs is enough bytes under way to hide the latency of memory: about
    25 to 35 KB a multiprocessor at 3.4 to 4.8 TB/s. Eight warps with four 16-byte loads each are 16 KB a program, and
    four programs fit a multiprocessor by their registers. Smaller rows take smaller tiles, since columns beyond the
    last whole tile are read with fewer loads under way.

    Rows that do not begin at multiples of 16 elements are read column by column, for which the smallest tile has
    registers enough: correct, and slow. Vocabularies padded to a multiple of 16 on every rank never are.
    """
    aligned = logits.stride(1) == 1 and logits.stride(0) % 16 == 0 and logits.data_ptr() % 16 == 0
    tiles = TILES if aligned else TILES[-1:]
    return next((tile for tile in tiles if 2 * tile.columns(logits.element_size()) <= columns), TILES[-1])


def _write_gradient(
    logits: Tensor, coefficients: Tensor, targets: Tensor, temperature: float, valid: int, vocab_start: int
) -> None:
    rows, columns = logits.shape
    if not rows or not columns:
        return
    if _overlaps(logits):
        raise ValueError(f"logits cannot be written in place: elements overlap, their strides are {logits.stride()}")
    tile = tile_for(logits, columns)
    with _device_of(logits):
        triton_rows.gradient_kernel[(rows,)](
            logits,
            targets.contiguous(),
            coefficients,
            rows,
            logits.stride(0),
            logits.stride(1),
            vocab_start,
            valid,
            columns,
            _scale(temperature),
            TILE=tile.columns(logits.element_size()),
            TAIL=tile.columns(logits.element_size()) // tile.vectors,
            num_warps=tile.num_warps,
        )


def _merge(
    statistics: Tensor,
    temperature: float,
    logprobs: Tensor | None,
    entropies: Tensor | None,
    logprob_gradients: Tensor | None,
    entropy_gradients: Tensor | None,
    coefficients: Tensor | None,
) -> None:
    rows = statistics.shape[1]
    if not rows:
        return
    with _device_of(statistics):
        triton_tokens.merge_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
            statistics.contiguous(),
            _float32(logprob_gradients),
            _float32(entropy_gradients),
            logprobs,
            entropies,
            coefficients,
            statistics.shape[0],
            rows,
            1 / temperature,
            _scale(temperature),
            HAS_GRADIENTS=logprob_gradients is not None,
            HAS_ENTROPY=entropy_gradients is not None,
            ROWS=ROWS_PER_PROGRAM,
        )


def _per_token(inputs: LossInputs) -> tuple[Tensor | None, ...]:
    """The constants in the order and the types of `loss_kernel`."""
    return (
        _float32(inputs.old_logprobs),
        _float32(inputs.advantages),
        inputs.replayed.contiguous().view(torch.uint8),
        _float32(inputs.policy_weights),
        _float32(inputs.entropy_weights),
    )


def _float32(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float().contiguous()


def _overlaps(tensor: Tensor) -> bool:
    """Whether some elements share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _scale(temperature: float) -> float:
    return math.log2(math.e) / temperature


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _check(logits: Tensor, targets: Tensor, temperature: float, valid: int) -> None:
    if logits.ndim != 2 or logits.dtype not in DTYPES:
        raise ValueError(f"logits must be [rows, columns] of {DTYPES}, found {tuple(logits.shape)} of {logits.dtype}")
    if targets.shape != logits.shape[:1] or targets.device != logits.device:
        raise ValueError(
            f"targets must be one a row of the logits, on {logits.device}, found {tuple(targets.shape)} for "
            f"{logits.shape[0]} rows, on {targets.device}"
        )
    if not 0 <= valid <= logits.shape[1]:
        raise ValueError(f"valid must be in 0..{logits.shape[1]} (the columns of the logits), found {valid}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}")


def _check_statistics(statistics: Tensor, logits: Tensor | None = None) -> int:
    """Their number of rows."""
    if statistics.ndim != 3 or statistics.shape[2] != 4 or statistics.dtype != torch.float32 or not len(statistics):
        raise ValueError(
            f"statistics must be [ranks, rows, 4] of float32, found {tuple(statistics.shape)} of {statistics.dtype}"
        )
    if logits is not None and (statistics.shape[1] != logits.shape[0] or statistics.device != logits.device):
        raise ValueError(
            f"statistics of {statistics.shape[1]} rows on {statistics.device} are not those of the "
            f"{logits.shape[0]} rows on {logits.device}"
        )
    return statistics.shape[1]
