"""Log-prob, entropy and per-token objective in plain torch: the definition faster implementations are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
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
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-prob of each target and entropy (nats) of softmax(logits / temperature).

    Columns from `valid_vocab` on are padding: they take no probability and get a gradient of exactly 0. Both outputs
    have exact gradients, are float32 (float64 for float64 logits), and neither pass makes a second copy of the
    logits in float32: backward recomputes the probabilities block by block.

    Raises:
        ValueError: temperature or valid_vocab is out of range.
        RuntimeError: a target is not below `valid_vocab` (from `gather`).
    """
    vocab = logits.shape[1]
    valid = vocab if valid_vocab is None else valid_vocab
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}")
    if not 0 < valid <= vocab:
        raise ValueError(f"valid_vocab must be in 1..{vocab} (the columns of the logits), found {valid}")
    logprobs, entropies = _LogprobEntropy.apply(logits, targets, temperature, valid)
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
    """Saves the logits as given and three numbers a row: the maximum, the sum of exponentials, and the entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, valid_vocab: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _statistics_dtype(logits)
        maxima, sums, logprobs, entropies = torch.empty(4, logits.shape[0], dtype=dtype, device=logits.device).unbind()
        for rows in _blocks(logits):
            block = logits[rows, :valid_vocab].to(dtype) / temperature
            maxima[rows] = block.amax(dim=1)
            # The target is shifted by the maximum before log(sum) is taken off: (t - m) - log s keeps its digits
            # where t - (m + log s) loses them to a large m.
            shifted = block.sub_(maxima[rows, None])
            target = shifted.gather(1, targets[rows, None].long()).squeeze(1)
            exponentials = shifted.exp()
            sums[rows] = exponentials.sum(dim=1)
            # A logit of -inf has exp 0, and its share of the entropy is the limit 0, not 0 * inf.
            first_moment = exponentials.mul_(shifted.clamp_(min=torch.finfo(dtype).min)).sum(dim=1)
            logprobs[rows] = target - sums[rows].log()
            entropies[rows] = sums[rows].log() - first_moment / sums[rows]
        ctx.save_for_backward(logits, targets, maxima, sums, entropies)
        ctx.temperature, ctx.valid_vocab = temperature, valid_vocab
        ctx.set_materialize_grads(False)
        return logprobs, entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if grad_logprobs is None and grad_entropies is None:
            return None, None, None, None
        logits = ctx.saved_tensors[0]
        grad = torch.zeros_like(logits) if ctx.valid_vocab < logits.shape[1] else torch.empty_like(logits)
        for rows in _blocks(logits):
            grad[rows, : ctx.valid_vocab] = _block_gradient(ctx, rows, grad_logprobs, grad_entropies)
        return grad, None, None, None


def _block_gradient(ctx: Any, rows: slice, grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Tensor:
    """d(logprob)/dz_j = [j = target] - p_j and d(entropy)/dz_j = -p_j (log p_j + H), with z = logits / temperature."""
    logits, targets, maxima, sums, entropies = ctx.saved_tensors
    log_probs = logits[rows, : ctx.valid_vocab].to(sums.dtype) / ctx.temperature
    log_probs.sub_(maxima[rows, None]).sub_(sums[rows, None].log())
    probs = log_probs.exp()
    if grad_entropies is None:
        grad = torch.zeros_like(probs)
    else:
        grad = log_probs.clamp_(min=torch.finfo(sums.dtype).min).add_(entropies[rows, None])
        grad.mul_(probs).mul_(-grad_entropies[rows, None])
    if grad_logprobs is not None:
        upstream = grad_logprobs[rows, None].to(grad.dtype)
        grad.sub_(probs.mul_(upstream)).scatter_add_(1, targets[rows, None].long(), upstream)
    return grad.div_(ctx.temperature)


def _statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _blocks(logits: Tensor) -> list[slice]:
    rows, vocab = logits.shape
    step = max(1, _BLOCK_ELEMENTS // vocab)
    return [slice(start, start + step) for start in range(0, rows, step)]
