"""Importance weights of replayed tokens, as the trainer's objective has them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from exgrpo_kernels.reference import Objective, Shaping, token_terms


def compute_importance_weights(
    logprobs: Float[Tensor, "*shape"],
    recorded_logprobs: Float[Tensor, "*shape"],
    *,
    max_abs_log_ratio: float = 20.0,
    shaping: Shaping = "none",
    beta: float = 0.1,
) -> Float[Tensor, "*shape"]:
    """Of each token w = exp(logprobs - recorded_logprobs), or what the loss has in its place, to be multiplied by the
    advantage and maximised.

    Differentiable in `logprobs`, of any one shape, such as [answers, tokens]. It is what the trainer's loss is made of
    (`exgrpo_kernels.reference.token_terms`).

    Args:
        logprobs: natural-log probabilities under the policy as it is now, at the temperature of the recorded ones.
        recorded_logprobs: of the same tokens, under the policy that wrote them, as recorded then.
        max_abs_log_ratio: log-ratios are clamped to +- this before exp; a clamped token has no gradient.
        shaping: `none`: w itself; `ratio`: f(w) = w / (w + beta), which bounds the push of a token by a quarter;
            `normalized_ratio`: f(w) (1 + beta)^2 / beta, whose push is 1 at w = 1; `sqrt`: the square root of w.
        beta: of f; without effect on the others.

    Raises:
        ValueError: shapes differ, a log-prob is not finite (its place is named), or an option is out of range.
    """
    if logprobs.shape != recorded_logprobs.shape:
        raise ValueError(f"logprobs have shape {list(logprobs.shape)}, recorded ones {list(recorded_logprobs.shape)}")
    for name, values in (("logprobs", logprobs), ("recorded_logprobs", recorded_logprobs)):
        _check_finite(name, values)
    if not (max_abs_log_ratio > 0 and beta > 0):
        raise ValueError(f"max_abs_log_ratio and beta must be above 0, found {max_abs_log_ratio} and {beta}")
    if shaping not in ("none", "ratio", "normalized_ratio", "sqrt"):
        raise ValueError(f"shaping = {shaping!r}: no weight of a ratio; one of none, ratio, normalized_ratio, sqrt")
    objective = Objective(shaping=shaping, shaping_beta=beta, max_abs_log_ratio=max_abs_log_ratio)
    new = logprobs.reshape(-1)
    # The loss of a token is -advantage * weight.
    minus_one, replayed = torch.full_like(new, -1.0), torch.ones_like(new, dtype=torch.bool)
    terms = token_terms(new, recorded_logprobs.detach().to(new).reshape(-1), minus_one, replayed, objective)
    return terms.policy_loss.reshape(logprobs.shape)


def _check_finite(name: str, values: Tensor) -> None:
    finite = values.detach().isfinite()
    if not finite.all():
        place = (~finite).nonzero()[0].tolist()
        raise ValueError(f"{name}[{', '.join(map(str, place))}] is {values.detach()[tuple(place)].item()}: not finite")
