"""What the launchers take: dtypes, strides, many rows, other losses; and what they refuse. Interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from interpreted import exact, gradient_error, needs_interpreter, random_inputs, relative
from torch import Tensor

from exgrpo_kernels.fused import LossInputs
from exgrpo_kernels.reference import Objective, logprob_entropy, token_terms

pytestmark = [*needs_interpreter, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]


def rows(count: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(count, columns, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def loss_in_place(logits: Tensor, inputs: LossInputs, valid: int | None = None):
    from exgrpo_kernels import triton_kernels

    options = {"temperature": 0.8, "valid": logits.shape[1] if valid is None else valid, "vocab_start": 0}
    statistics = triton_kernels.row_statistics(logits, inputs.targets, **options)
    return triton_kernels.loss_and_gradient(
        logits, statistics[None], inputs.targets, inputs, Objective(), **options, write_gradient=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_have_float32_statistics_and_a_gradient_rounded_once(dtype: torch.dtype):
    """To half a unit in the last place of float16; the interpreter cuts off where a GPU rounds to bfloat16: a whole."""
    logits = rows(4, 5000, dtype)
    inputs = random_inputs(logits, valid=4990, temperature=0.8)
    expected = exact(logits, inputs, Objective(), temperature=0.8, valid=4990)
    found = loss_in_place(logits, inputs, valid=4990)
    assert logits.dtype == dtype
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    assert relative(found.entropies, expected.entropies) < 1e-6
    limits = torch.finfo(dtype)
    units = 0.51 if dtype == torch.float16 else 1.01
    torch.testing.assert_close(
        logits.double(), expected.gradient, rtol=units * limits.eps, atol=limits.smallest_normal * limits.eps
    )


@pytest.mark.parametrize("layout", ["rows apart", "odd row stride", "transposed", "every other column"])
def test_strides_do_not_change_the_result(layout: str):
    wide = rows(600, 1212)
    logits = {
        "rows apart": wide[::50, :300],
        "odd row stride": wide.flatten()[: 12 * 301].view(12, 301)[:, 1:],
        "transposed": wide[:300, :12].t(),
        "every other column": wide[:12, 0:600:2],
    }[layout]
    assert logits.shape == (12, 300)
    inputs = random_inputs(logits, valid=300, temperature=0.8)
    expected = exact(logits, inputs, Objective(), temperature=0.8, valid=300)
    untouched = wide.sum() - logits.sum()
    found = loss_in_place(logits, inputs)
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    assert gradient_error(logits, expected.gradient, inputs, 0.8) < 1e-5
    torch.testing.assert_close(wide.sum() - logits.sum(), untouched, rtol=1e-4, atol=0.05)


def test_constants_of_other_types_and_strides_are_taken_as_they_are():
    logits, again = rows(8, 200), rows(8, 200)
    inputs = random_inputs(logits, valid=200)
    other = LossInputs(
        targets=inputs.targets.int(),
        old_logprobs=inputs.old_logprobs.double(),
        advantages=torch.stack([inputs.advantages, inputs.advantages], dim=1)[:, 1],
        replayed=torch.stack([inputs.replayed, ~inputs.replayed], dim=1)[:, 0],
        policy_weights=inputs.policy_weights,
        entropy_weights=inputs.entropy_weights,
    )
    found, expected = loss_in_place(logits, other), loss_in_place(again, inputs)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(logits, again)


def test_a_row_2_to_the_31_elements_away_is_reached():
    """The storage is 4 GiB of address space, of which two rows are ever touched."""
    stride, columns = 2**31 + 8, 40
    logits = torch.empty(stride + columns, dtype=torch.bfloat16).as_strided((2, columns), (stride, 1))
    logits.copy_(rows(2, columns))
    inputs = random_inputs(logits.clone(), valid=columns, temperature=0.8)
    expected = exact(logits.clone(), inputs, Objective(), temperature=0.8, valid=columns)
    found = loss_in_place(logits, inputs)
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    torch.testing.assert_close(logits.clone().double(), expected.gradient, rtol=2**-7, atol=1e-6)


def test_70000_tokens_of_two_ranks_agree_with_the_reference(monkeypatch):
    """From statistics made by torch, in larger blocks: the interpreter would need minutes for as many programs."""
    from exgrpo_kernels import triton_kernels

    monkeypatch.setattr(triton_kernels, "ROWS_PER_PROGRAM", 4096)
    logits = rows(70_000, 6)
    inputs = random_inputs(logits, valid=6)
    expected = exact(logits, inputs, Objective(), temperature=1.0, valid=6)
    statistics = torch.stack(
        [torch_statistics(logits[:, :4], inputs.targets), torch_statistics(logits[:, 4:], inputs.targets - 4)]
    )
    found = triton_kernels.loss_and_gradient(
        logits, statistics, inputs.targets, inputs, Objective(),
        temperature=1.0, valid=6, vocab_start=0, write_gradient=False,
    )  # fmt: skip
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    assert relative(found.entropies, expected.entropies) < 1e-6
    assert relative(found.loss, expected.loss) < 3e-6
    assert found.clipped.sum() > 1000, "the comparison below needs both"
    assert torch.equal(found.clipped, expected.clipped)


def torch_statistics(logits: Tensor, targets: Tensor) -> Tensor:
    maxima = logits.amax(dim=1)
    shifted = logits - maxima[:, None]
    here = (targets >= 0) & (targets < logits.shape[1])
    own = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1).where(here, torch.nan)
    return torch.stack([maxima, shifted.exp().sum(1), (shifted.exp() * shifted).sum(1), own], dim=1)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_of_another_loss_agrees_with_autograd(with_entropy: bool):
    from exgrpo_kernels import triton_kernels

    logits = rows(6, 3000)
    inputs = random_inputs(logits, valid=2990)
    upstream = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))
    upstream[:, 4] = 0
    whole = logits.double().requires_grad_()
    logprobs, entropies = logprob_entropy(whole, inputs.targets, temperature=0.6, valid_vocab=2990)
    (upstream[0] * logprobs + (upstream[1] * entropies if with_entropy else 0)).sum().backward()

    options = {"temperature": 0.6, "valid": 2990, "vocab_start": 0}
    statistics = triton_kernels.row_statistics(logits, inputs.targets, **options)[None]
    found = triton_kernels.logprob_entropy(statistics, temperature=0.6)
    assert relative(found[0], logprobs.detach()) < 1e-6
    assert relative(found[1], entropies.detach()) < 1e-6
    triton_kernels.write_gradient(
        logits, statistics, inputs.targets, upstream[0], upstream[1] if with_entropy else None, **options
    )
    assert whole.grad is not None
    scale = whole.grad.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    assert ((logits - whole.grad).abs() / scale).max() < 1e-5
    assert not logits[4].any()
    assert not logits[:, 2990:].any()


def test_the_ratio_at_its_bounds_is_clipped_and_clamped_as_the_reference_says():
    """Log-ratios just within and beyond the clip (log 1.2, log 0.8) and the clamp (+-3), for both signs of A."""
    from exgrpo_kernels import triton_kernels

    edges = [0.1822, 0.1824, -0.2231, -0.2232, 2.999, 3.001, -2.999, -3.001]
    logits = rows(16, 50)
    objective = Objective(max_abs_log_ratio=3.0)
    targets = torch.arange(16)
    logprobs = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    inputs = LossInputs(
        targets=targets,
        old_logprobs=logprobs - torch.tensor(edges + edges),
        advantages=torch.tensor([1.0] * 8 + [-1.0] * 8),
        replayed=torch.zeros(16, dtype=torch.bool),
        policy_weights=torch.ones(16),
        entropy_weights=None,
    )
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    options = {"temperature": 1.0, "valid": 50, "vocab_start": 0}
    statistics = triton_kernels.row_statistics(logits, targets, **options)[None]
    found = triton_kernels.loss_and_gradient(
        logits, statistics, targets, inputs, objective, **options, write_gradient=True
    )
    # A > 0 is clipped above 1.2, A < 0 below 0.8.
    clipped = [edge in (0.1824, 2.999, 3.001) for edge in edges] + [edge in (-0.2232, -2.999, -3.001) for edge in edges]
    assert terms.clipped.tolist() == clipped
    assert found.clipped.tolist() == clipped
    assert found.clamped.tolist() == [False] * 5 + [True, False, True] + [False] * 5 + [True, False, True]
    moved = [not (clip or clamp) for clip, clamp in zip(clipped, found.clamped.tolist(), strict=True)]
    assert logits.any(dim=1).tolist() == moved


def test_no_rows_and_no_columns_are_nothing_to_do():
    from exgrpo_kernels import triton_kernels

    none = torch.empty(0, dtype=torch.int64)
    statistics = triton_kernels.row_statistics(rows(0, 9), none, temperature=1.0, valid=9, vocab_start=0)
    assert statistics.shape == (0, 4)
    assert [len(part) for part in triton_kernels.logprob_entropy(statistics[None], temperature=1.0)] == [0, 0]
    lowest = torch.finfo(torch.float32).min
    empty = triton_kernels.row_statistics(rows(2, 0), torch.tensor([0, 1]), temperature=1.0, valid=0, vocab_start=4)
    assert empty[:, :3].tolist() == [[lowest, 0.0, 0.0]] * 2
    assert empty[:, 3].isnan().all()


REFUSED = {
    "logits must be": {"logits": torch.zeros(2, 4, dtype=torch.float64)},
    "targets must be one a row": {"targets": torch.zeros(3, dtype=torch.int64)},
    r"valid must be in 0\.\.4": {"valid": 5},
    "temperature must be above 0, found 0": {"temperature": 0.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_computed_is_refused(message: str):
    from exgrpo_kernels import triton_kernels

    arguments = {
        "logits": torch.zeros(2, 4), "targets": torch.zeros(2, dtype=torch.int64),
        "temperature": 1.0, "valid": 4, "vocab_start": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        triton_kernels.row_statistics(**(arguments | REFUSED[message]))


def test_rows_that_share_memory_are_not_written_in_place():
    from exgrpo_kernels import triton_kernels

    logits, targets = torch.zeros(1, 4).expand(3, 4), torch.zeros(3, dtype=torch.int64)
    options = {"temperature": 1.0, "valid": 4, "vocab_start": 0}
    statistics = triton_kernels.row_statistics(logits, targets, **options)[None]
    with pytest.raises(ValueError, match="cannot be written in place"):
        triton_kernels.write_gradient(logits, statistics, targets, torch.ones(3), None, **options)
    with pytest.raises(ValueError, match="are not those of the 3 rows"):
        triton_kernels.write_gradient(logits, statistics[:, :2], targets, torch.ones(3), None, **options)
