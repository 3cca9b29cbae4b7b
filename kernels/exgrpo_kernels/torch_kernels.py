"""The two passes over logits in torch: statistics of each row, then loss and gradient.

Rows are worked on in blocks that stay in the cache of a processor core, where each of the small operations costs little
beside the exponential. `triton_kernels` has the same functions for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_kernels.reference import Objective, TokenTerms, token_terms
from exgrpo_kernels.statistics import LOWEST_EXPONENT, RowStatistics, merge
from exgrpo_kernels.types import LossInputs, TokenLoss

# 1 MiB of float32: a block and its exponentials fit in the L2 caches of two cores.
_BLOCK_ELEMENTS = 1 << 18


def row_statistics(
    logits: Float[Tensor, "rows columns"],
    targets: Int[Tensor, " rows"],
    *,
    temperature: float,
    valid: int,
    vocab_start: int,
) -> Float[Tensor, "rows 4"]:
    """The four numbers of `statistics` of each row, over the first `valid` columns; float32 (float64 of float64).

    `targets` count from column 0 of the vocabulary, `vocab_start` is the first column here.
    """
    dtype = statistics_dtype(logits.dtype)
    partials = logits.new_zeros(logits.shape[0], 4, dtype=dtype)
    lowest = torch.finfo(dtype).min
    if valid == 0:
        partials[:, 0], partials[:, 3] = lowest, torch.nan
        return partials
    own, columns = _own_targets(targets, vocab_start, valid)
    for rows in _blocks(logits.shape[0], valid):
        block = logits[rows, :valid]
        # A rank may hold nothing but -inf, and -inf - -inf is NaN.
        maxima = block.amax(dim=1, keepdim=True).to(dtype).clamp_(min=lowest)
        exponents = _exponents(block, maxima, temperature)
        exponentials = exponents.exp()
        part = partials[rows]
        part[:, 0] = maxima.squeeze(1)
        torch.sum(exponentials, dim=1, out=part[:, 1])
        part[:, 2] = exponentials.mul_(exponents).sum(dim=1)
        part[:, 3] = block.gather(1, columns[rows, None]).squeeze(1)
    partials[:, 3] = partials[:, 3].where(own, torch.nan)
    return partials


def logprob_entropy(
    statistics: Float[Tensor, "ranks rows 4"], *, temperature: float
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Log-prob of each target and entropy (nats) from the statistics of all ranks."""
    rows = merge(statistics, temperature)
    return rows.logprobs, rows.entropies


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
    """The loss of each row; with `write_gradient`, the derivative of their sum takes the place of the logits.

    Columns from `valid` on get a gradient of 0.
    """
    rows = merge(statistics, temperature)
    terms = token_terms(rows.logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    loss = inputs.policy_weights * terms.policy_loss
    if inputs.entropy_weights is not None:
        loss = loss - inputs.entropy_weights * rows.entropies
    if write_gradient:
        slopes = _slopes(terms, inputs, objective)
        bonus = None if inputs.entropy_weights is None else -inputs.entropy_weights
        _replace_by_gradient(logits, rows, targets, slopes, bonus, temperature, valid, vocab_start)
    return TokenLoss(rows.logprobs, rows.entropies, terms.log_ratio, loss, terms.clipped, terms.clamped)


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
    """Put the gradient of the logits in their place, given that of each log-prob and entropy (None: 0)."""
    rows = merge(statistics, temperature)
    _replace_by_gradient(logits, rows, targets, logprob_gradients, entropy_gradients, temperature, valid, vocab_start)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slopes(terms: TokenTerms, inputs: LossInputs, objective: Objective) -> Tensor:
    """d loss / d logprob of each token, in closed form: the loss itself, -A w, of a plain ratio w, its product with
    beta / (w + beta) for f(w) and with 1/2 for the square root, -A for the log-prob, and 0 where the loss is flat."""
    if objective.kind == "nll":
        return -inputs.advantages.to(terms.log_ratio.dtype) * inputs.policy_weights
    bound, beta = objective.max_abs_log_ratio, objective.shaping_beta
    replayed = terms.policy_loss
    match objective.shaping:
        case "ratio" | "normalized_ratio":
            ratio = terms.log_ratio.clamp(-bound, bound).exp_()
            replayed = terms.policy_loss * (beta / (ratio + beta))
        case "sqrt":
            replayed = 0.5 * terms.policy_loss
        case "log_prob":
            replayed = -inputs.advantages.to(terms.log_ratio.dtype)
    slopes = replayed.where(inputs.replayed, terms.policy_loss)
    return slopes.masked_fill_(terms.clipped | terms.clamped, 0.0).mul_(inputs.policy_weights)


def _replace_by_gradient(
    logits: Tensor,
    statistics: RowStatistics,
    targets: Tensor,
    slopes: Tensor,
    entropy_slopes: Tensor | None,
    temperature: float,
    valid: int,
    start: int,
) -> None:
    """With z = (x - m) / T, p = exp(z) / s, and slopes g of the loss in the log-prob and h in the entropy H:

    T d loss / dx_j = g ([j = target] - p_j) - h p_j (log p_j + H) = g [j = target] - exp(z_j) (a + h / s z_j)
    with a = (h (H - log s) + g) / s.
    """
    if valid < logits.shape[1]:
        logits[:, valid:] = 0
    if valid == 0:
        return
    factor = (-1 / temperature) / statistics.sums
    constant, linear = slopes * factor, None
    if entropy_slopes is not None:
        linear = entropy_slopes * factor
        constant = constant + linear * (statistics.entropies - statistics.log_sums)
    own, columns = _own_targets(targets, start, valid)
    at_target = (slopes / temperature).where(own, 0.0).to(factor.dtype)
    for rows in _blocks(logits.shape[0], valid):
        block = logits[rows, :valid]
        grad = _exponents(block, statistics.maxima[rows, None], temperature, reuse=True)
        if linear is None:
            grad.exp_().mul_(constant[rows, None])
        else:
            exponentials = grad.exp()
            grad.mul_(linear[rows, None]).add_(constant[rows, None]).mul_(exponentials)
        grad.scatter_add_(1, columns[rows, None], at_target[rows, None])
        if grad.dtype != block.dtype:
            block.copy_(grad)


def _exponents(block: Tensor, maxima: Tensor, temperature: float, *, reuse: bool = False) -> Tensor:
    """(block - maxima) / temperature in the dtype of the maxima; in the block itself where asked and possible."""
    in_place = reuse and block.dtype == maxima.dtype
    exponents = block.sub_(maxima) if in_place else torch.sub(block, maxima)
    if temperature != 1:
        exponents.div_(temperature)
    return exponents.clamp_(min=LOWEST_EXPONENT)


def _own_targets(targets: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Which targets are among the columns here, and each one's column (any, if it is not here)."""
    columns = targets.long() - start
    return (columns >= 0) & (columns < valid), columns.clamp_(0, valid - 1)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))
