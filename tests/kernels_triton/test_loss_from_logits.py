"""Statistics, loss and gradient of the Triton kernels, interpreted on the CPU, against float64.

Tolerances are those of float32: log-prob and entropy 1e-6, gradients 1e-5.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import exact, gradient_error, needs_interpreter, random_inputs, relative, shards, with_target
from torch import Tensor

from exgrpo_kernels.fused import LossInputs
from exgrpo_kernels.reference import Objective

pytestmark = [*needs_interpreter, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]

OBJECTIVES = {
    "clip and shaping": Objective(clip_min=0.2, clip_max=0.28),
    "clip alone": Objective(shaping="none"),
    "shaping alone": Objective(clip=False, shaping_beta=0.3),
    "plain ratio": Objective(clip=False, shaping="none"),
    "normalized ratio": Objective(shaping="normalized_ratio", max_abs_log_ratio=0.5),
    "square root": Objective(shaping="sqrt", max_abs_log_ratio=0.5),
    "replayed clipped": Objective(clip=False, shaping="clip"),
    "log-prob": Objective(shaping="log_prob", max_abs_log_ratio=0.5),
    "supervised": Objective(kind="nll"),
}


def rows(count: int, columns: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) * scale


def run(logits: Tensor, inputs: LossInputs, objective: Objective, *, temperature: float, valid: int, ranks: int):
    """Per-token results and the gradient of all columns; every rank must report the same."""
    from exgrpo_kernels import triton_kernels

    parts = shards(logits, ranks, valid)
    options = [{"temperature": temperature, "valid": part.valid, "vocab_start": part.vocab_start} for part in parts]
    statistics = torch.stack(
        [
            triton_kernels.row_statistics(part.logits, inputs.targets, **option)
            for part, option in zip(parts, options, strict=True)
        ]
    )
    results = [
        triton_kernels.loss_and_gradient(
            part.logits, statistics, inputs.targets, inputs, objective, **option, write_gradient=True
        )
        for part, option in zip(parts, options, strict=True)
    ]
    for result in results:
        torch.testing.assert_close(result.loss, results[0].loss, rtol=0, atol=0, equal_nan=True)
    return results[0], torch.cat([part.logits for part in parts], dim=1)


def check(
    logits: Tensor,
    inputs: LossInputs,
    objective: Objective | None = None,
    *,
    temperature: float = 1.0,
    valid: int | None = None,
    ranks: int = 1,
) -> None:
    objective = objective or Objective()
    valid = logits.shape[1] if valid is None else valid
    expected = exact(logits, inputs, objective, temperature=temperature, valid=valid)
    found, gradient = run(logits, inputs, objective, temperature=temperature, valid=valid, ranks=ranks)
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    assert relative(found.entropies, expected.entropies) < 1e-6
    assert relative(found.loss, expected.loss) < 3e-6
    assert relative(found.log_ratio, expected.log_ratio) < 2e-6
    assert torch.equal(found.clipped, expected.clipped)
    assert torch.equal(found.clamped, expected.clamped)
    assert gradient_error(gradient, expected.gradient, inputs, temperature) < 1e-5
    assert not gradient[:, valid:].any(), "a padded column has a gradient"


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_objective_agrees_with_float64_on_shared_columns(objective: Objective, ranks: int):
    logits = rows(12, 1016)
    inputs = random_inputs(logits, valid=1000, temperature=0.7)
    check(logits, inputs, objective, temperature=0.7, valid=1000, ranks=ranks)


# 101: less than a tile. 4099 and 9001: prime, so that no row but the first begins at a multiple of 16 bytes. 16384:
# four of the largest tiles, with nothing left over.
@pytest.mark.parametrize("columns", [101, 4099, 9001, 16384, 32000])
def test_vocabularies_of_any_size_agree_with_float64(columns: int):
    logits = rows(4, columns)
    check(logits, random_inputs(logits, valid=columns))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_vocabulary_of_151936_columns_agrees_with_float64(ranks: int):
    logits = rows(2, 151936)
    check(logits, random_inputs(logits, valid=151669), valid=151669, ranks=ranks)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("level", [1e4, -1e4])
def test_logits_of_ten_thousand_keep_their_digits(level: float, temperature: float):
    logits = rows(6, 600, scale=2.0) + level
    check(logits, random_inputs(logits, valid=600, temperature=temperature), temperature=temperature, ranks=2)


@pytest.mark.parametrize("scale", [50.0, 1e4])
def test_peaked_rows_agree_with_float64(scale: float):
    logits = rows(8, 2000, scale=scale)
    check(logits, random_inputs(logits, valid=2000), ranks=2)


def test_targets_of_probability_almost_0_are_clamped_and_get_no_gradient_of_the_ratio():
    logits = rows(4, 300)
    logits[:, 7] = -200.0
    inputs = with_target(random_inputs(logits, valid=300), 7)
    check(logits, inputs)
    found, gradient = run(
        logits, replace(inputs, entropy_weights=None), Objective(), temperature=1.0, valid=300, ranks=1
    )
    assert found.clamped.all()
    assert not gradient.any()


def test_a_rank_of_nothing_but_minus_infinity_takes_no_probability():
    logits = rows(4, 800)
    logits[:, :400] = -torch.inf
    inputs = random_inputs(logits, valid=800)
    check(logits, inputs, ranks=2)
    check(logits, inputs, ranks=4)


def test_scattered_logits_of_minus_infinity_have_no_share_in_the_entropy():
    logits = rows(4, 5000)
    logits[:, ::3] = -torch.inf
    check(logits, random_inputs(logits, valid=5000), ranks=2)


def test_a_rank_of_nothing_but_padding_takes_no_probability():
    logits = rows(4, 800)
    check(logits, random_inputs(logits, valid=390), valid=390, ranks=2)
    check(logits, random_inputs(logits, valid=200), valid=200, ranks=4)


@pytest.mark.parametrize("valid", [768, 767, 513])
def test_a_target_in_the_last_column_is_found(valid: int):
    logits = rows(4, 1024)
    inputs = with_target(random_inputs(logits, valid=valid), valid - 1)
    inputs = replace(inputs, old_logprobs=inputs.old_logprobs - 3)
    check(logits, inputs, valid=valid, ranks=1)
    check(logits, inputs, valid=valid, ranks=4)


def test_one_valid_column_has_log_prob_and_entropy_0_and_no_gradient():
    logits = rows(3, 64)
    inputs = replace(random_inputs(logits, valid=1), targets=torch.zeros(3, dtype=torch.int64))
    found, gradient = run(logits, inputs, Objective(), temperature=1.0, valid=1, ranks=2)
    assert not found.logprobs.any()
    assert not found.entropies.any()
    assert not gradient.any()


def test_a_target_on_no_rank_has_a_log_prob_of_nan():
    logits = rows(2, 64)
    inputs = with_target(random_inputs(logits, valid=60), 61)
    found, _ = run(logits, inputs, Objective(), temperature=1.0, valid=60, ranks=2)
    assert found.logprobs.isnan().all()


def test_logits_that_are_not_numbers_do_not_go_unseen():
    logits = rows(3, 3000)
    logits[0, 17], logits[1, 2999] = torch.nan, torch.inf
    inputs = random_inputs(rows(3, 3000), valid=3000)
    found, _ = run(logits, inputs, Objective(), temperature=1.0, valid=3000, ranks=2)
    assert found.loss.isnan().tolist() == [True, True, False]


def test_tokens_without_weight_have_no_loss_and_no_gradient_whatever_their_logits():
    logits = rows(6, 500)
    inputs = random_inputs(logits, valid=500)
    assert inputs.entropy_weights is not None
    inputs.policy_weights[2:4] = 0
    inputs.entropy_weights[2:4] = 0
    check(logits, inputs)
    logits[2], logits[3] = torch.nan, -torch.inf
    found, gradient = run(logits, inputs, Objective(), temperature=1.0, valid=500, ranks=2)
    assert found.loss[2:4].tolist() == [0.0, 0.0]
    assert not gradient[2:4].any()
    assert gradient[:2].any(dim=1).all()
    assert gradient[4:].any(dim=1).all()
