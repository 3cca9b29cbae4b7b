"""Log-prob, entropy and per-token objective in plain torch: the definition faster implementations are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

Shaping = Literal["ratio", "normalized_ratio", "none", "sqrt", "clip", "log_prob"]
"""What replayed tokens have in place of the ratio w, b being `Objective.shaping_beta`.

| name | term | push: its derivative in the log-prob | at w = 1 | at most |
|---|---|---|---|---|
| `ratio` | w / (w + b) | w b / (w + b)^2 | b / (1 + b)^2 | 1/4, at w = b |
| `normalized_ratio` | (1 + b)^2 / b x w / (w + b) | w (1 + b)^2 / (w + b)^2 | 1 | (1 + b)^2 / 4b, at w = b |
| `none` | w | w | 1 | no bound |
| `sqrt` | square root of w | half of that | 1/2 | no bound |
| `clip` | w, clipped as PPO does | w, or 0 where it is clipped | 1 | 1 + clip_max for an advantage above 0 |
| `log_prob` | the log-prob | 1 | 1 | 1 |
"""

# Its exponential is 0 in float32 and float64.
_LOWEST_EXPONENT = -1e4


@dataclass(frozen=True)
class Objective:
    """Which per-token term is minimised (Eq. 4 and 7 of arXiv:2510.02245 and their switches)."""

    kind: Literal["ratio", "nll"] = "ratio"
    """`ratio`: importance ratio times advantage. `nll`: supervised, `-advantage * logprob`; the rest is unused."""
    clip: bool = True
    """PPO clip of fresh tokens; replayed tokens are clipped by `shaping` alone."""
    clip_min: float = 0.2
    clip_max: float = 0.2
    shaping: Shaping = "ratio"
    """What replayed tokens have in place of the ratio."""
    shaping_beta: float = 0.1
    max_abs_log_ratio: float = 20.0
    """Log-ratios are clamped to +- this before exp; a clamped token has no gradient, unless no ratio is used of it
    (`log_prob`)."""


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
    """The log-ratio was beyond `max_abs_log_ratio`, and was used."""


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
    are float32 (float64 for float64 logits), and autograd has their exact gradients.

    With a `group` whose ranks each hold some columns of the vocabulary, `logits` are this rank's, which begin at column
    `vocab_start`; targets and `valid_vocab` still count from column 0, and `logits` may be all padding. Every rank must
    call with the same targets and gets the same outputs; the backward pass gives the gradient of the logits that are
    here.

    Raises:
        ValueError: temperature or valid_vocab is out of range.
        RuntimeError: a target is not below `valid_vocab`.
    """
    valid = _valid_columns(logits.shape[1], targets, temperature, valid_vocab, group, vocab_start)
    values, columns = logits[:, :valid].to(_statistics_dtype(logits)), targets.long()[:, None] - vocab_start
    own = torch.ones_like(columns, dtype=torch.bool)
    if group is not None:
        # One more column, of no probability: to look up what another rank has, and for a rank that has only padding.
        own = (columns >= 0) & (columns < valid)
        values = torch.nn.functional.pad(values, (0, 1), value=torch.finfo(values.dtype).min)
        columns = columns.where(own, valid)
    maxima = values.detach().amax(dim=1, keepdim=True)
    if group is not None:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    z = (values - maxima) / temperature
    exponentials = z.exp()
    # A logit of -inf has exp 0, and its share of the entropy is the limit 0, not 0 * inf.
    moments = torch.linalg.vecdot(exponentials, z.clamp(min=_LOWEST_EXPONENT))
    rows = torch.stack([exponentials.sum(dim=1), moments, z.gather(1, columns).where(own, 0.0).squeeze(1)])
    if group is not None:
        rows = _SumOverRanks.apply(rows, group)
    sums, moments, shifted_targets = rows.unbind()
    # (t - m) - log s keeps its digits where t - (m + log s) loses them to a large m.
    return shifted_targets - sums.log(), sums.log() - moments / sums


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
    bounded = torch.maximum(plain, -advantages * ratio.clamp(1 - objective.clip_min, 1 + objective.clip_max))
    fresh = bounded if objective.clip else plain
    off_policy, beyond = plain, log_ratio.detach().abs() > bound
    match objective.shaping:
        case "clip":
            off_policy = bounded
        case "log_prob":
            off_policy, beyond = -advantages * logprobs, beyond & ~replayed
        case kind if kind != "none":
            off_policy = -advantages * shaping(ratio, objective.shaping_beta, kind)
    policy_loss = torch.where(replayed, off_policy, fresh)
    may_be_clipped = torch.where(replayed, objective.shaping == "clip", objective.clip)
    return TokenTerms(
        policy_loss=policy_loss,
        log_ratio=log_ratio.detach(),
        clipped=(bounded > plain) & may_be_clipped,
        clamped=beyond,
    )


def shaping(w: Float[Tensor, "*shape"], beta: float, kind: Shaping = "ratio") -> Float[Tensor, "*shape"]:
    """The term of a ratio w, see `Shaping`; w itself where it is not shaped.

    `ratio` is f(w) of arXiv:2510.02245, bounded by 1.
    """
    match kind:
        case "ratio":
            return w / (w + beta)
        case "normalized_ratio":
            return w / (w + beta) * shaping_factor(beta, kind)
        case "sqrt":
            return w.sqrt()
    return w


def shaping_factor(beta: float, kind: Shaping) -> float:
    """What `normalized_ratio` multiplies f(w) by, so that its push is 1 at w = 1; 1 for the others."""
    return (1 + beta) ** 2 / beta if kind == "normalized_ratio" else 1.0


class _SumOverRanks(torch.autograd.Function):
    """Every rank makes the same loss of the sum, and so has the gradient of what it added itself."""

    @staticmethod
    def forward(_: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _valid_columns(
    columns: int,
    targets: Tensor,
    temperature: float,
    valid_vocab: int | None,
    group: dist.ProcessGroup | None,
    vocab_start: int,
) -> int:
    """How many of the first `columns` here are no padding, after all checks but that of targets without a group."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}")
    if group is None:
        valid = columns if valid_vocab is None else valid_vocab
        if not 0 < valid <= columns:
            raise ValueError(f"valid_vocab must be in 1..{columns} (the columns of the logits), found {valid}")
        return valid
    if valid_vocab is None or valid_vocab < 1:
        raise ValueError(f"valid_vocab must be the whole vocabulary's where columns are shared, found {valid_vocab}")
    # Without a wait for the device: gather, which refuses such a target otherwise, sees only the columns here.
    torch._assert_async(((targets >= 0) & (targets < valid_vocab)).all(), "a target is not in the vocabulary")
    return min(max(valid_vocab - vocab_start, 0), columns)


def _statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
