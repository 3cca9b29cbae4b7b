"""Importance weights of recorded log-probs."""

import math

import pytest
import torch

from exgrpo_kernels.reference import Objective, token_terms
from exgrpo_megatron.replay import compute_importance_weights


def test_a_weight_is_the_ratio_of_probabilities_token_by_token():
    # exp(-1 - -1.5) = 1.648721, exp(-2 - -1) = 0.367879, and 1 where nothing has moved.
    now, then = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]]), torch.tensor([[-1.5, -1.0], [-3.0, -0.5]])
    weights = compute_importance_weights(now, then)
    assert weights.shape == (2, 2)
    assert weights.flatten().tolist() == pytest.approx([1.648721, 0.367879, 1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("shaping", "beta", "expected"),
    # At w = 2: 2 / 2.1, 2 / 2.5, the square root; the normalised one is 1.1^2 / 0.1 = 12.1 times the first.
    [("ratio", 0.1, 0.952381), ("ratio", 0.5, 0.8), ("sqrt", 0.1, 1.414214), ("normalized_ratio", 0.1, 11.523810)],
)
def test_shapings_bound_the_weight(shaping, beta, expected):
    now, then = torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)])
    weights = compute_importance_weights(now, then, shaping=shaping, beta=beta)
    assert weights.item() == pytest.approx(expected, abs=1e-5)


def test_the_gradient_is_what_the_token_is_pushed_by():
    # w f'(w) = w beta / (w + beta)^2 at w = 1, beta = 0.1: 0.0826446; without shaping w itself.
    for shaping, expected in (("ratio", 0.0826446), ("normalized_ratio", 1.0), ("none", 1.0)):
        now = torch.tensor([-1.0], requires_grad=True)
        compute_importance_weights(now, torch.tensor([-1.0]), shaping=shaping).sum().backward()
        assert now.grad.item() == pytest.approx(expected, abs=1e-6)


def test_a_log_ratio_beyond_the_bound_is_clamped_and_has_no_gradient():
    now = torch.tensor([-1.0, -1.0, -9.0], requires_grad=True)
    weights = compute_importance_weights(now, torch.tensor([-2.0, -5.0, -1.0]), max_abs_log_ratio=3.0)
    assert weights.tolist() == pytest.approx([math.e, math.exp(3), math.exp(-3)], rel=1e-6)
    weights.sum().backward()
    assert now.grad.tolist() == pytest.approx([math.e, 0, 0], rel=1e-6)


def test_it_is_what_the_loss_of_the_trainer_is_made_of():
    generator = torch.Generator().manual_seed(0)
    now, then, advantages = (torch.randn(50, generator=generator) for _ in range(3))
    replayed = torch.ones(50, dtype=torch.bool)
    terms = token_terms(now, then, advantages, replayed, Objective(shaping="ratio", shaping_beta=0.3))
    weights = compute_importance_weights(now, then, shaping="ratio", beta=0.3)
    assert torch.equal(terms.policy_loss, -advantages * weights)


def test_recorded_log_probs_get_no_gradient():
    then = torch.tensor([-1.0], requires_grad=True)
    now = torch.tensor([-1.5], requires_grad=True)
    compute_importance_weights(now, then).sum().backward()
    assert then.grad is None


@pytest.mark.parametrize(
    ("now", "then", "options", "message"),
    [
        ([-1.0], [-1.0, -2.0], {}, r"shape \[1\], recorded ones \[2\]"),
        ([-1.0, math.nan], [-1.0, -2.0], {}, r"^logprobs\[1\] is nan: not finite"),
        ([-1.0, -1.0], [-1.0, -math.inf], {}, r"recorded_logprobs\[1\] is -inf: not finite"),
        ([-1.0], [-1.0], {"beta": 0.0}, "beta must be above 0"),
        ([-1.0], [-1.0], {"max_abs_log_ratio": 0.0}, "max_abs_log_ratio"),
        ([-1.0], [-1.0], {"shaping": "clip"}, "shaping = 'clip'"),
    ],
)
def test_what_cannot_be_weighed_is_refused_by_name(now, then, options, message):
    with pytest.raises(ValueError, match=message):
        compute_importance_weights(torch.tensor(now), torch.tensor(then), **options)
