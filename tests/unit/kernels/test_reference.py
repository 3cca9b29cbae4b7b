"""The reference definition against autograd of plain log_softmax, gradcheck, and hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from exgrpo_kernels.reference import Objective, logprob_entropy, shaping, token_terms


def plain(logits: Tensor, targets: Tensor, temperature: float = 1.0, valid: int | None = None) -> tuple[Tensor, Tensor]:
    """The independent implementation: torch's own log_softmax, differentiated by autograd."""
    log_probs = (logits[:, :valid].double() / temperature).log_softmax(dim=1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)


def random_rows(
    tokens: int, vocab: int, scale: float = 3.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return logits.to(dtype), targets


def terms(log_ratio: float, advantage: float, replayed: bool, objective: Objective) -> tuple[float, float, bool, bool]:
    """Loss, its gradient in the new log-prob, and the two flags of a single token whose old log-prob is -1."""
    logprob = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    result = token_terms(
        logprob,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([replayed]),
        objective,
    )
    result.policy_loss.sum().backward()
    assert logprob.grad is not None
    return result.policy_loss.item(), logprob.grad.item(), bool(result.clipped), bool(result.clamped)


def test_gradcheck_holds_for_both_outputs_with_temperature_and_padding():
    logits, targets = random_rows(4, 7, dtype=torch.float64)
    logits.requires_grad_()
    targets = targets.clamp(max=4)
    assert torch.autograd.gradcheck(lambda z: logprob_entropy(z, targets, temperature=0.7, valid_vocab=5), (logits,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("valid", [None, 90])
def test_values_and_gradients_agree_with_autograd_of_log_softmax(temperature: float, valid: int | None):
    logits, targets = random_rows(40, 97)
    targets = targets.clamp(max=(valid or 97) - 1)
    upstream = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))

    ours = logits.clone().requires_grad_()
    logprobs, entropies = logprob_entropy(ours, targets, temperature=temperature, valid_vocab=valid)
    (logprobs * upstream[0] + entropies * upstream[1]).sum().backward()
    theirs = logits.double().requires_grad_()
    expected_logprobs, expected_entropies = plain(theirs, targets, temperature, valid)
    (expected_logprobs * upstream[0] + expected_entropies * upstream[1]).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("used", ["logprobs", "entropies"])
def test_one_output_alone_can_be_differentiated(used: str):
    logits, targets = random_rows(5, 11, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    index = ["logprobs", "entropies"].index(used)
    logprob_entropy(ours, targets)[index].sum().backward()
    plain(theirs, targets)[index].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_uniform_logits_have_entropy_log_v_and_no_entropy_gradient():
    logits = torch.full((2, 8), 3.0, requires_grad=True)
    logprobs, entropies = logprob_entropy(logits, torch.tensor([0, 7]))
    entropies.sum().backward()
    torch.testing.assert_close(entropies, torch.full((2,), math.log(8)))
    torch.testing.assert_close(logprobs, torch.full((2,), -math.log(8)))
    torch.testing.assert_close(logits.grad, torch.zeros(2, 8), atol=1e-7, rtol=0)


def test_logits_of_ten_thousand_keep_their_digits():
    """(t - m) - log s, not t - (m + log s): the latter is off by 4e-4 at this size."""
    logits, targets = random_rows(16, 50)
    logits = (logits + 1e4).detach()
    expected_logprobs, expected_entropies = plain(logits, targets)
    logprobs, entropies = logprob_entropy(logits, targets)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-6, atol=1e-6)


def test_minus_infinity_logits_take_no_probability_and_stay_finite():
    logits = torch.tensor([[0.0, -math.inf, 0.0]], requires_grad=True)
    logprobs, entropies = logprob_entropy(logits, torch.tensor([2]))
    (logprobs + entropies).sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropies.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.0, 0.5]]))


def test_padded_columns_get_no_probability_and_exactly_no_gradient():
    logits = torch.tensor([[1.0, 1.0, 50.0]], requires_grad=True)
    logprobs, entropies = logprob_entropy(logits, torch.tensor([0]), valid_vocab=2)
    (logprobs + entropies).sum().backward()
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert logits.grad[0, 2].item() == 0.0


def test_a_target_in_a_padded_column_is_refused():
    with pytest.raises(RuntimeError, match="out of bounds"):
        logprob_entropy(torch.zeros(1, 4), torch.tensor([3]), valid_vocab=3)


@pytest.mark.parametrize(("temperature", "valid"), [(0.0, None), (-1.0, None), (1.0, 5), (1.0, 0)])
def test_a_temperature_or_vocabulary_out_of_range_is_refused(temperature: float, valid: int | None):
    with pytest.raises(ValueError, match="must be"):
        logprob_entropy(torch.zeros(1, 4), torch.tensor([0]), temperature=temperature, valid_vocab=valid)


def test_bfloat16_logits_have_float32_statistics_and_bfloat16_gradients():
    logits, targets = random_rows(8, 33, dtype=torch.bfloat16)
    logits.requires_grad_()
    logprobs, entropies = logprob_entropy(logits, targets)
    logprobs.sum().backward()
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logprobs.double(), plain(logits.detach(), targets)[0], rtol=1e-6, atol=1e-6)


def test_no_tokens_give_empty_outputs():
    logits = torch.zeros(0, 4, requires_grad=True)
    logprobs, entropies = logprob_entropy(logits, torch.zeros(0, dtype=torch.long))
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert logits.grad.shape == (0, 4)


@pytest.mark.parametrize(("w", "f"), [(0.1, 0.5), (1.0, 0.90909), (5.0, 0.98039), (10.0, 0.99010)])
def test_shaping_has_the_values_of_the_algorithm(w: float, f: float):
    """docs/algorithm.md: f(0.1)=0.5, f(1)=0.90909, f(5)=0.98039, f(10)=0.99010."""
    assert shaping(torch.tensor(w, dtype=torch.float64), 0.1).item() == pytest.approx(f, abs=5e-6)
    assert terms(math.log(w), 2.0, True, Objective())[0] == pytest.approx(-2 * f, abs=1e-5)


@pytest.mark.parametrize(("w", "weight"), [(1.0, 0.1 / 1.1**2), (0.1, 0.25), (10.0, 1.0 / 10.1**2)])
def test_the_gradient_of_a_replayed_token_is_w_beta_over_w_plus_beta_squared(w: float, weight: float):
    """0.0826 of a fresh token's gradient where the policy has not moved, at most 0.25 (at w = beta)."""
    assert terms(math.log(w), 1.0, True, Objective())[1] == pytest.approx(-weight, rel=1e-9)
    if w == 1.0:
        assert weight == pytest.approx(0.0826, abs=5e-5)


@pytest.mark.parametrize(
    ("kind", "w", "term", "push"),
    [
        # 1.1^2 / 0.1 = 12.1 times f(w) and its push: 12.1 / 1.1 = 11; 12.1 / 2; 12.1 x 10 / 10.1, 12.1 / 10.1^2.
        ("normalized_ratio", 1.0, 11.0, 1.0),
        ("normalized_ratio", 0.1, 6.05, 3.025),
        ("normalized_ratio", 10.0, 11.9801980, 0.1186158),
        ("none", 3.0, 3.0, 3.0),
        ("sqrt", 1.0, 1.0, 0.5),
        ("sqrt", 4.0, 2.0, 1.0),
        ("clip", 1.1, 1.1, 1.1),
        ("clip", 1.5, 1.2, 0.0),
        ("clip", 0.01, 0.01, 0.01),
    ],
)
def test_a_replayed_token_has_the_term_and_the_push_of_its_shaping(kind: str, w: float, term: float, push: float):
    loss, gradient, clipped, clamped = terms(math.log(w), 2.0, True, Objective(clip=False, shaping=kind))
    assert (loss, gradient) == (pytest.approx(-2 * term), pytest.approx(-2 * push))
    assert (clipped, clamped) == (kind == "clip" and push == 0, False)


def test_the_normalized_push_is_largest_at_beta_where_it_is_three_for_a_tenth():
    w = torch.logspace(-4, 4, 801, dtype=torch.float64)
    push = 1.1**2 * w / (w + 0.1) ** 2
    got = torch.tensor([terms(math.log(x), 1.0, True, Objective(shaping="normalized_ratio"))[1] for x in w.tolist()])
    torch.testing.assert_close(-got, push.float())
    assert push.max().item() == pytest.approx(1.1**2 / 0.4) == pytest.approx(3.025)
    assert w[push.argmax()].item() == pytest.approx(0.1)


def test_a_replayed_log_prob_is_pushed_by_its_advantage_however_far_its_ratio_is():
    # The log-prob of `terms` is that of the old policy, -1, and the log-ratio beyond the bound of 20.
    loss, gradient, clipped, clamped = terms(30.0, 0.5, True, Objective(shaping="log_prob"))
    assert (loss, gradient, clipped, clamped) == (-0.5 * 29.0, -0.5, False, False)
    assert terms(30.0, 0.5, False, Objective(shaping="log_prob", clip=False))[1::2] == (0.0, True)


@pytest.mark.parametrize(
    ("w", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 0.75, -0.825, -0.825, False),
        (1.5, 0.75, -0.9, 0.0, True),
        (0.5, 0.75, -0.375, -0.375, False),
        (0.5, -0.25, 0.2, 0.0, True),
        (1.5, -0.25, 0.375, 0.375, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_the_clip_removes_the_gradient_only_where_ppo_says(
    w: float, advantage: float, loss: float, gradient: float, clipped: bool
):
    """By hand: -min(w A, clip(w, 0.8, 1.2) A)."""
    got = terms(math.log(w), advantage, False, Objective())
    assert got[:2] == (pytest.approx(loss), pytest.approx(gradient))
    assert got[2:] == (clipped, False)


def test_bounds_above_and_below_are_separate():
    assert terms(math.log(1.25), 1.0, False, Objective(clip_max=0.28))[2] is False
    assert terms(math.log(1.30), 1.0, False, Objective(clip_max=0.28))[0] == pytest.approx(-1.28)
    assert terms(math.log(0.75), -1.0, False, Objective(clip_min=0.3))[2] is False


def test_without_clip_a_fresh_token_is_the_plain_ratio():
    assert terms(math.log(1.5), 0.75, False, Objective(clip=False)) == (
        pytest.approx(-1.125),
        pytest.approx(-1.125),
        False,
        False,
    )


def test_replayed_tokens_are_never_clipped_and_without_shaping_are_the_plain_ratio():
    assert terms(math.log(3.0), 1.0, True, Objective(shaping="none"))[:3] == (
        pytest.approx(-3.0),
        pytest.approx(-3.0),
        False,
    )


def test_a_log_ratio_beyond_the_bound_is_clamped_flagged_and_reported_unclamped():
    result = token_terms(
        torch.tensor([0.0, -40.0]),
        torch.tensor([-30.0, -1.0]),
        torch.tensor([1.0, 1.0]),
        torch.tensor([True, False]),
        Objective(shaping="none", clip=False),
    )
    assert result.log_ratio.tolist() == [30.0, -39.0]
    assert result.clamped.tolist() == [True, True]
    torch.testing.assert_close(result.policy_loss, torch.tensor([-math.exp(20.0), -math.exp(-20.0)]))
    assert terms(30.0, 1.0, True, Objective(shaping="none"))[1] == 0.0


def test_supervised_terms_are_minus_advantage_times_logprob():
    loss, gradient, clipped, clamped = terms(100.0, 0.5, False, Objective(kind="nll"))
    assert (loss, gradient, clipped, clamped) == (-0.5 * 99.0, -0.5, False, False)


def test_the_reported_log_ratio_is_detached():
    logprobs = torch.zeros(1, requires_grad=True)
    result = token_terms(logprobs, torch.zeros(1), torch.ones(1), torch.tensor([False]), Objective())
    assert result.policy_loss.requires_grad
    assert not result.log_ratio.requires_grad
