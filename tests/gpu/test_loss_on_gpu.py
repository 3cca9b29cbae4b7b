"""The fused loss on a GPU, from logits and from hidden states, against float64.

Tolerances: float32 log-prob and entropy 1e-6, or 3e-6 where a GPU's own exp2 and log (2 units) add up; gradients 1e-5;
16-bit gradients are the exact ones rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from interpreted import Exact, exact, gradient_error, random_inputs, relative, shards
from torch import Tensor

from exgrpo_kernels import fused
from exgrpo_kernels.fused import LossInputs, OutputHead
from exgrpo_kernels.reference import Objective

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

OBJECTIVE = Objective(clip_max=0.28)
VALUES = 3e-6
GRADIENTS = 1e-5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def rows(count: int, columns: int, dtype: torch.dtype, device: torch.device, level: float = 0.0) -> Tensor:
    values = 3 * torch.randn(count, columns, generator=torch.Generator().manual_seed(0)) + level
    return values.to(device, dtype)


def inputs_for(logits: Tensor, *, valid: int, temperature: float) -> LossInputs:
    return moved(random_inputs(logits.float().cpu(), valid=valid, temperature=temperature), logits.device)


def moved(inputs: LossInputs, device: torch.device) -> LossInputs:
    return replace(inputs, **{name: value.to(device) for name, value in vars(inputs).items()})


def run(logits: Tensor, inputs: LossInputs, *, temperature: float, valid: int, ranks: int = 1):
    """Results of the first rank, and the gradient of all columns."""
    from exgrpo_kernels import triton_kernels

    parts = shards(logits, ranks, valid)
    options = [{"temperature": temperature, "valid": part.valid, "vocab_start": part.vocab_start} for part in parts]
    both = list(zip(parts, options, strict=True))
    statistics = torch.stack(
        [triton_kernels.row_statistics(part.logits, inputs.targets, **option) for part, option in both]
    )
    results = [
        triton_kernels.loss_and_gradient(
            part.logits, statistics, inputs.targets, inputs, OBJECTIVE, **option, write_gradient=True
        )
        for part, option in both
    ]
    return results[0], torch.cat([part.logits for part in parts], dim=1)


def check_values(found, expected: Exact) -> None:
    assert relative(found.logprobs, expected.logprobs) < VALUES
    assert relative(found.entropies, expected.entropies) < VALUES
    assert relative(found.loss, expected.loss) < 3 * VALUES
    assert torch.equal(found.clipped, expected.clipped)
    assert torch.equal(found.clamped, expected.clamped)


def check_gradient(
    gradient: Tensor, expected: Exact, inputs: LossInputs, temperature: float, *, interpreted: bool
) -> None:
    if gradient.dtype == torch.float32:
        assert gradient_error(gradient, expected.gradient, inputs, temperature) < GRADIENTS
        return
    limits = torch.finfo(gradient.dtype)
    # The interpreter cuts off to bfloat16 where a GPU rounds.
    units = 1.02 if interpreted and gradient.dtype == torch.bfloat16 else 0.52
    floor = max(1e-7, limits.smallest_normal * limits.eps)
    torch.testing.assert_close(gradient.double(), expected.gradient, rtol=units * limits.eps, atol=floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [101, 4099, 32000, 151936])
def test_logits_of_any_type_and_vocabulary_agree_with_float64(columns: int, dtype: str, device, small: bool):
    logits = rows(2 if small else 64, columns, DTYPES[dtype], device)
    inputs = inputs_for(logits, valid=columns - 5, temperature=0.8)
    expected = exact(logits, inputs, OBJECTIVE, temperature=0.8, valid=columns - 5)
    found, gradient = run(logits, inputs, temperature=0.8, valid=columns - 5)
    check_values(found, expected)
    check_gradient(gradient, expected, inputs, 0.8, interpreted=device.type == "cpu")
    assert not gradient[:, columns - 5 :].any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_columns_in_parts_agree_with_float64_at_logits_of_ten_thousand(ranks: int, device, small: bool):
    columns = 1024 if small else 151936
    logits = rows(4 if small else 32, columns, torch.float32, device, level=1e4)
    logits[:, : columns // 4] = -torch.inf
    inputs = inputs_for(logits, valid=columns - 267, temperature=1.0)
    expected = exact(logits, inputs, OBJECTIVE, temperature=1.0, valid=columns - 267)
    found, gradient = run(logits, inputs, temperature=1.0, valid=columns - 267, ranks=ranks)
    check_values(found, expected)
    check_gradient(gradient, expected, inputs, 1.0, interpreted=device.type == "cpu")


def test_more_rows_than_a_grid_has_in_its_second_dimension_agree_with_float64(device, small: bool):
    """70,000 rows; kernels that count rows along y or z stop at 65,535."""
    logits = rows(70 if small else 70_000, 513, torch.bfloat16, device)
    inputs = inputs_for(logits, valid=510, temperature=1.0)
    expected = exact(logits, inputs, OBJECTIVE, temperature=1.0, valid=510)
    found, gradient = run(logits, inputs, temperature=1.0, valid=510)
    # Among so many ratios, some are so near a bound that float32 and float64 are on either side of it.
    assert (found.clipped != expected.clipped).float().mean() < 1e-4
    assert relative(found.logprobs, expected.logprobs) < VALUES
    assert relative(found.entropies, expected.entropies) < VALUES
    agreed = found.clipped == expected.clipped
    error = (gradient.double() - expected.gradient).abs().amax(1) / expected.gradient.abs().amax(1).clamp(min=1e-7)
    assert error[agreed].max() < 2**-7


def test_logits_of_more_than_2_to_the_31_elements_are_addressed(device, small: bool):
    """The last rows are compared; 32-bit offsets would have put them elsewhere."""
    columns = 151936
    count = 3 if small else 2**31 // columns + 64
    logits = torch.empty(count, columns, dtype=torch.bfloat16, device=device)
    logits[:-2] = 0
    logits[-2:] = rows(2, columns, torch.bfloat16, device)
    last = inputs_for(logits[-2:], valid=columns, temperature=1.0)
    expected = exact(logits[-2:], last, OBJECTIVE, temperature=1.0, valid=columns)
    inputs = LossInputs(
        **{name: torch.zeros(count, dtype=value.dtype, device=device) for name, value in vars(last).items()}
    )
    for name, value in vars(last).items():
        getattr(inputs, name)[-2:] = value
    from exgrpo_kernels import triton_kernels

    options = {"temperature": 1.0, "valid": columns, "vocab_start": 0}
    statistics = triton_kernels.row_statistics(logits, inputs.targets, **options)[None]
    found = triton_kernels.loss_and_gradient(
        logits, statistics, inputs.targets, inputs, OBJECTIVE, **options, write_gradient=True
    )
    assert relative(found.logprobs[-2:], expected.logprobs) < VALUES
    check_gradient(logits[-2:], expected, last, 1.0, interpreted=device.type == "cpu")
    assert not logits[:-2].any(), "a row without weight has a gradient"


PRECISIONS = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, None),
    "mixed": (torch.bfloat16, torch.float32),
}
"""Of hidden states and weight, and of the `main_grad` that the weight's gradient is added to, if there is one."""


@pytest.mark.parametrize("form", ["linear", "logits"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_hidden_states_to_loss_agree_with_float64(precision: str, form: fused.Form, device, small: bool):
    """Given the same rounded inputs. Log-probs never pass through 16 bits; 16-bit gradients lose some of them."""
    dtype, main_grad = PRECISIONS[precision]
    tokens, width, columns = (6, 32, 200) if small else (300, 1024, 32000)
    hidden, head, inputs = problem(tokens, width, columns, dtype, main_grad, device)
    expected = exact_from_hidden(hidden, head, inputs)
    result = fused.token_loss(hidden, head, inputs, OBJECTIVE, form=form)
    result.loss.backward()
    values = 1e-5 if dtype == torch.float32 else 2e-5
    assert relative(result.logprobs, expected["logprobs"]) < values
    assert relative(result.entropies, expected["entropies"]) < values
    assert relative(result.loss.detach(), expected["loss"]) < 10 * values
    gradients = 1e-4 if dtype == torch.float32 else 2e-2
    weight_gradient = head.weight.grad if head.main_grad is None else head.main_grad
    assert norm_error(hidden.grad, expected["hidden"]) < gradients
    assert norm_error(weight_gradient, expected["weight"]) < gradients


def problem(tokens: int, width: int, columns: int, dtype: torch.dtype, main_grad: torch.dtype | None, device):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    weight = (2 * torch.randn(columns, width, generator=generator) / width**0.5).to(device, dtype).requires_grad_()
    inputs = inputs_for((hidden.detach().float() @ weight.detach().float().t()), valid=columns - 3, temperature=0.9)
    sink = None if main_grad is None else torch.zeros(columns, width, dtype=main_grad, device=device)
    return hidden, OutputHead(weight, valid_vocab=columns - 3, temperature=0.9, main_grad=sink), inputs


def exact_from_hidden(hidden: Tensor, head: OutputHead, inputs: LossInputs) -> dict[str, Tensor]:
    wide_hidden, wide_weight = hidden.detach().double(), head.weight.detach().double()
    result = exact(wide_hidden @ wide_weight.t(), inputs, OBJECTIVE, temperature=0.9, valid=head.valid_vocab)
    return {
        "logprobs": result.logprobs,
        "entropies": result.entropies,
        "loss": result.loss.sum(),
        "hidden": result.gradient @ wide_weight,
        "weight": result.gradient.t() @ wide_hidden,
    }


def norm_error(found: Tensor | None, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    assert found is not None
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def no_waiting(device) -> Iterator[None]:
    """torch raises wherever the host would wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    yield
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait_for_the_gpu(device, small: bool, request: pytest.FixtureRequest):
    hidden, head, inputs = problem(6 if small else 300, 32, 200, torch.bfloat16, torch.float32, device)
    fused.token_loss(hidden, head, inputs, OBJECTIVE).loss.backward()  # compiles
    request.getfixturevalue("no_waiting")
    fused.token_loss(hidden, head, inputs, OBJECTIVE).loss.backward()


def test_twice_the_same_is_the_same_bit_for_bit(device, small: bool):
    logits = rows(4 if small else 512, 1000 if small else 32000, torch.bfloat16, device)
    inputs = inputs_for(logits, valid=1000, temperature=1.0)
    first, first_gradient = run(logits, inputs, temperature=1.0, valid=1000)
    second, second_gradient = run(logits, inputs, temperature=1.0, valid=1000)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first_gradient, second_gradient)
