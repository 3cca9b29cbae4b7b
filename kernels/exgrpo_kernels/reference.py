"""Log-prob, entropy and per-token objective in plain torch: the definition faster implementations are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows are worked on in blocks of about this many logits, so that float32 temporaries stay near 4 MiB each.
_BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Objective:
    """Which per-token term is minimised (Eq. 4 and 7 of arXiv:2510.02245 and their switches)."""

    kind: Literal["ratio", "nll"] = "ratio"
    """`ratio`: importance ratio times advantage. `nll`: supervised, `-advantage * logprob`; the rest is unused."""
    clip: bool = True
    """PPO clip of fresh tokens; replayed tokens are never clipped."""
    clip_min: float = 0.2
    clip_max: float = 0.2
    shaping: bool = True
    """Replayed tokens use `f(w) = w / (w + shaping_beta)` in place of the ratio `w`."""
    shaping_beta: float = 0.1
    max_abs_log_ratio: float = 20.0
    """Log-ratios are clamped to +- this before exp; a clamped token has no gradient."""


@dataclass(frozen=True)
class TokenTerms:
    """The objective of each token, not yet weighted or summed."""

    policy_loss: Float[Tensor, " tokens"]
    """Differentiable in the new log-probs; to be minimised."""
    log_ratio: Float[Tensor, " tokens"]
    """`logprobs - old_logprobs`, before clamping, detached."""
    clipped: Bool[Tensor, " tokens"]
    """The PPO clip removed this token's gradient."""
    clamped: Bool[Tensor, " tokens"]
    """The log-ratio was beyond `max_abs_log_ratio`."""


def logprob_entropy(
    logits: Float[Tensor, "tokens vocab"],
    targets: Int[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    valid_vocab: int | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each target and entropy (nats) of softmax(logits / temperature).

    Columns from `valid_vocab` on are padding: they take no probability and get a gradient of exactly 0. Both outputs
    have exact gradients, are float32 (float64 for float64 logits), and neither pass makes a second copy of the
    logits in float32: backward recomputes the probabilities block by block.

    With a `group` whose ranks each hold some columns of the vocabulary, `logits` are this rank's, which begin at column
    `vocab_start`; targets and `valid_vocab` still count from column 0, and `logits` may be all padding. Every rank must
    call with the same targets and gets the same outputs, for two all-reduces; backward needs no communication, and
    gives the gradient of the logits that are here.

    Raises:
        ValueError: temperature or valid_vocab is out of range.
        RuntimeError: a target is not below `valid_vocab`.
    """
    columns = logits.shape[1]
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}")
    if group is not None:
        if valid_vocab is None or valid_vocab < 1:
            raise ValueError(
                f"valid_vocab must be the whole vocabulary's where columns are shared, found {valid_vocab}"
            )
        # Without a wait for the device: gather, which refuses such a target otherwise, sees only the columns here.
        torch._assert_async(((targets >= 0) & (targets < valid_vocab)).all(), "a target is not in the vocabulary")
        valid = min(max(valid_vocab - vocab_start, 0), columns)
    else:
        valid = columns if valid_vocab is None else valid_vocab
        if not 0 < valid <= columns:
            raise ValueError(f"valid_vocab must be in 1..{columns} (the columns of the logits), found {valid}")
    logprobs, entropies = _LogprobEntropy.apply(logits, targets - vocab_start, temperature, valid, group)
    return logprobs, entropies


def token_terms(
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    replayed: Bool[Tensor, " tokens"],
    objective: Objective,
) -> TokenTerms:
    """The per-token objective and what is reported about it.

    `old_logprobs` are the ratio's denominators: of the policy before the update for fresh tokens, of the policy that
    wrote the answer for replayed ones.
    """
    log_ratio = logprobs - old_logprobs
    never = torch.zeros_like(replayed)
    if objective.kind == "nll":
        return TokenTerms(-advantages * logprobs, log_ratio.detach(), clipped=never, clamped=never)
    bound = objective.max_abs_log_ratio
    ratio = log_ratio.clamp(-bound, bound).exp()
    plain = -advantages * ratio
    fresh = plain
    if objective.clip:
        fresh = torch.maximum(plain, -advantages * ratio.clamp(1 - objective.clip_min, 1 + objective.clip_max))
    off_policy = -advantages * shaping(ratio, objective.shaping_beta) if objective.shaping else plain
    return TokenTerms(
        policy_loss=torch.where(replayed, off_policy, fresh),
        log_ratio=log_ratio.detach(),
        clipped=(fresh > plain) & ~replayed,
        clamped=log_ratio.detach().abs() > bound,
    )


def shaping(w: Float[Tensor, "*shape"], beta: float) -> Float[Tensor, "*shape"]:
    """`f(w) = w / (w + beta)`: bounded by 1, and its gradient weight `w f'(w)` is largest (0.25) at `w = beta`."""
    return w / (w + beta)


class _LogprobEntropy(torch.autograd.Function):
    """Saves the logits as given and three numbers a row: the maximum, the sum of exponentials, and the entropy.

    `targets` are columns of these logits; with a group, those below 0 or not below `valid` are another rank's.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, valid: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        statistics = _row_statistics(logits, targets, temperature, valid, group is not None)
        if group is not None:
            statistics = _merge(statistics, (targets >= 0) & (targets < valid), temperature, group)
        maxima, sums, moments, shifted_targets = statistics
        logprobs = shifted_targets - sums.log()
        entropies = sums.log() - moments / sums
        ctx.save_for_backward(logits, targets, maxima, sums, entropies)
        ctx.temperature, ctx.valid, ctx.shared = temperature, valid, group is not None
        ctx.set_materialize_grads(False)
        return logprobs, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None, None
        logits = ctx.saved_tensors[0]
        grad = torch.zeros_like(logits) if ctx.valid < logits.shape[1] else torch.empty_like(logits)
        for rows in _blocks(logits) if ctx.valid else ():
            grad[rows, : ctx.valid] = _block_gradient(ctx, rows, grad_logprobs, grad_entropies)
        return grad, None, None, None, None


def _row_statistics(
    logits: Tensor, targets: Tensor, temperature: float, valid: int, shared: bool
) -> tuple[Tensor, ...]:
    """Of each row, over the first `valid` columns with z = logits / temperature and m = max z: max logits, sum
    exp(z - m), sum exp(z - m)(z - m), and z - m of the target (where columns are shared: of any column, if it is not
    here)."""
    dtype = _statistics_dtype(logits)
    lowest = torch.finfo(dtype).min
    statistics = torch.zeros(4, logits.shape[0], dtype=dtype, device=logits.device)
    maxima, sums, moments, shifted_targets = statistics.unbind()
    if valid == 0:
        return maxima.fill_(lowest), sums, moments, shifted_targets
    for rows in _blocks(logits):
        block = logits[rows, :valid]
        maxima[rows] = block.amax(dim=1).to(dtype)
        if shared:  # a rank may hold nothing but -inf
            maxima[rows] = maxima[rows].clamp(min=lowest)
        # The target is shifted by the maximum before log(sum) is taken off: (t - m) - log s keeps its digits
        # where t - (m + log s) loses them to a large m.
        shifted = _shifted(block, maxima[rows, None], temperature)
        columns = targets[rows, None].long()
        shifted_targets[rows] = shifted.gather(1, columns.clamp(0, valid - 1) if shared else columns).squeeze(1)
        exponentials = shifted.exp()
        sums[rows] = exponentials.sum(dim=1)
        # A logit of -inf has exp 0, and its share of the entropy is the limit 0, not 0 * inf.
        moments[rows] = exponentials.mul_(shifted.clamp_(min=lowest)).sum(dim=1)
    return maxima, sums, moments, shifted_targets


def _merge(
    statistics: tuple[Tensor, ...], owned: Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Statistics of whole rows from those of the ranks' columns: shift each to the common maximum, then add.

    `owned` are the rows whose target is here. exp(z - M) = exp(z - m) exp(m - M) and z - M = (z - m) + (m - M), where
    m and M are the maxima over the temperature.
    """
    maxima, sums, moments, shifted_targets = statistics
    common = maxima.clone()
    dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
    # A rank without columns has the lowest of all numbers for a maximum, and the difference must stay finite.
    shift = ((maxima - common) / temperature).clamp(min=torch.finfo(maxima.dtype).min)
    scale = shift.exp()
    targets = (shifted_targets + shift).where(owned, 0.0)
    packed = torch.stack([sums * scale, (moments + shift * sums) * scale, targets])
    dist.all_reduce(packed, group=group)
    return common, *packed.unbind()


def _block_gradient(ctx: Any, rows: slice, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Tensor:
    """d(logprob)/dz_j = [j = target] - p_j and d(entropy)/dz_j = -p_j (log p_j + H), with z = logits / temperature."""
    logits, targets, maxima, sums, entropies = ctx.saved_tensors
    log_probs = _shifted(logits[rows, : ctx.valid], maxima[rows, None], ctx.temperature).sub_(sums[rows, None].log())
    if grad_entropies is None:
        probs = log_probs.exp_()
        grad = None
    else:
        probs = log_probs.exp()
        grad = log_probs.clamp_(min=torch.finfo(sums.dtype).min).add_(entropies[rows, None])
        grad.mul_(probs).mul_(-grad_entropies[rows, None])
    if grad_logprobs is not None:
        upstream = grad_logprobs[rows, None].to(sums.dtype)
        grad = probs.mul_(-upstream) if grad is None else grad.addcmul_(probs, upstream, value=-1)
        _add_at_targets(grad, targets[rows, None].long(), upstream, ctx.shared)
    assert grad is not None, "backward has one of the two gradients"
    return grad if ctx.temperature == 1 else grad.div_(ctx.temperature)


def _shifted(logits: Tensor, maxima: Tensor, temperature: float) -> Tensor:
    """(logits - maxima) / temperature as a new tensor in the dtype of the maxima."""
    shifted = torch.sub(logits, maxima)
    return shifted if temperature == 1 else shifted.div_(temperature)


def _add_at_targets(grad: Tensor, targets: Tensor, values: Tensor, shared: bool) -> None:
    """Add to `grad` at the targets; where columns are shared, at those that are here."""
    if shared:
        own = (targets >= 0) & (targets < grad.shape[1])
        targets, values = targets.clamp(0, grad.shape[1] - 1), values.where(own, 0.0)
    grad.scatter_add_(1, targets, values)


def _statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _blocks(logits: Tensor) -> list[slice]:
    rows, vocab = logits.shape
    step = max(1, _BLOCK_ELEMENTS // vocab)
    return [slice(start, start + step) for start in range(0, rows, step)]
