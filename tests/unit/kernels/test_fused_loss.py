"""The fused loss, through `fused.token_loss`, against float64 autograd of torch's own log_softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exgrpo_kernels import fused, products, torch_kernels
from exgrpo_kernels.chunk_size import default_chunk_rows
from exgrpo_kernels.fused import Columns, FusedLoss, LossInputs, Objective, OutputHead
from exgrpo_kernels.reference import token_terms

FORMS = ("linear", "logits", "reference")
OBJECTIVES = {
    "ratio": Objective(),
    "without clip": Objective(clip=False),
    "without shaping": Objective(shaping="none"),
    "normalized": Objective(shaping="normalized_ratio", max_abs_log_ratio=0.5),
    "square root": Objective(shaping="sqrt", max_abs_log_ratio=0.5),
    "replayed clipped": Objective(clip=False, shaping="clip"),
    "log-prob": Objective(shaping="log_prob", max_abs_log_ratio=0.5),
    "narrow": Objective(clip_min=0.01, clip_max=0.02, shaping_beta=0.5, max_abs_log_ratio=0.05),
    "nll": Objective(kind="nll"),
}


def random_inputs(tokens: int, vocab: int, *, spread: float = 0.3, bonus: bool = True) -> LossInputs:
    """Old log-probs are within `spread` of a uniform policy's, so that ratios are on both sides of every bound."""
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64)

    return LossInputs(
        targets=torch.randint(0, vocab, (tokens,), generator=generator),
        old_logprobs=-torch.tensor(float(vocab), dtype=torch.float64).log() + spread * normal(),
        advantages=normal(),
        replayed=torch.rand(tokens, generator=generator) < 0.4,
        policy_weights=normal().abs() / tokens,
        entropy_weights=0.01 * normal().abs() / tokens if bonus else None,
    )


def random_layer(
    tokens: int, hidden: int, columns: int, *, logit_scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns, hidden, generator=generator, dtype=torch.float64) * (logit_scale / hidden**0.5)
    return states.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def in_dtype(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    names = ("old_logprobs", "advantages", "policy_weights", "entropy_weights")
    values = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{name: None if value is None else value.to(dtype) for name, value in values.items()})


def expected_loss(
    logits: Tensor, inputs: LossInputs, objective: Objective, *, temperature: float = 1.0, valid: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The independent implementation, in float64: loss, log-probs and entropies."""
    log_probs = (logits.double()[:, :valid] / temperature).log_softmax(dim=1)
    logprobs = log_probs.gather(1, inputs.targets[:, None]).squeeze(1)
    # A probability of 0 takes no part in the entropy, nor in its gradient.
    taken = log_probs.masked_fill(log_probs < -700, 0.0)
    entropies = -(log_probs.exp() * taken).sum(dim=1)
    inputs = in_dtype(inputs, torch.float64)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    loss = (inputs.policy_weights * terms.policy_loss).sum()
    if inputs.entropy_weights is not None:
        loss = loss - (inputs.entropy_weights * entropies).sum()
    return loss, logprobs, entropies


def assert_as_float64(
    hidden: Tensor, weight: Tensor, inputs: LossInputs, objective: Objective, form: str, *,
    chunk_size: int | None = None, valid: int | None = None, temperature: float = 1.0, tolerance: float = 1e-6,
) -> tuple[FusedLoss, LossInputs]:  # fmt: skip
    """Log-probs and entropies to `tolerance`, gradients to ten times that of their largest element.

    Old log-probs are moved to about the new ones, as they are in training: the ratio of two that are far apart turns
    the last digit of a log-prob into a large error of the gradient, by whatever it is computed.
    """
    valid = len(weight) if valid is None else valid
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits, layout = exact[0] @ exact[1].t(), {"temperature": temperature, "valid": valid}
    logprobs = expected_loss(logits, inputs, objective, **layout)[1].detach()
    moved = (inputs.old_logprobs + logprobs + torch.tensor(float(valid)).log()).float().double()
    inputs = replace(inputs, old_logprobs=moved)
    loss, logprobs, entropies = expected_loss(logits, inputs, objective, **layout)
    expected = torch.autograd.grad(loss, exact)
    head = OutputHead(weight, valid_vocab=valid, temperature=temperature)
    chunked = {} if form == "reference" else {"chunk_size": chunk_size}
    found = fused.token_loss(hidden, head, in_dtype(inputs, hidden.dtype), objective, form=form, **chunked)
    gradients = torch.autograd.grad(found.loss, [hidden, weight])
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.entropies.double(), entropies, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours.double() - theirs).abs().max() <= 10 * tolerance * theirs.abs().max() + 1e-12
    return found, inputs


@pytest.mark.parametrize("form", ["linear", "logits"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("bonus", [True, False])
def test_gradients_are_the_numeric_derivatives_of_the_loss(form: str, name: str, bonus: bool):
    """In float64: 5 tokens, 2 a chunk, 2 padded columns."""
    hidden, weight = random_layer(5, 3, 9)
    inputs = random_inputs(5, 7, bonus=bonus)

    def loss() -> Tensor:
        head = OutputHead(weight, valid_vocab=7, temperature=0.7)
        return fused.token_loss(hidden, head, inputs, OBJECTIVES[name], form=form, chunk_size=2).loss

    loss().backward()
    for tensor in (hidden, weight):
        torch.testing.assert_close(tensor.grad, numeric_gradient(loss, tensor), rtol=1e-6, atol=1e-9)


@torch.no_grad()
def numeric_gradient(loss: Callable[[], Tensor], tensor: Tensor, step: float = 1e-5) -> Tensor:
    """Central differences; gradcheck would ask for gradients twice."""
    gradient = torch.empty_like(tensor)
    for index in range(tensor.numel()):
        values = []
        for sign in (1, -1):
            tensor.view(-1)[index] += sign * step
            values.append(loss())
            tensor.view(-1)[index] -= sign * step
        gradient.view(-1)[index] = (values[0] - values[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_form_has_the_flags_and_numbers_of_the_definition(form: str, name: str):
    """40 tokens, fresh and replayed, some of each clipped or clamped; 7 a chunk."""
    hidden, weight = random_layer(40, 16, 101)
    inputs, objective = random_inputs(40, 101), OBJECTIVES[name]
    found, inputs = assert_as_float64(
        hidden, weight, inputs, objective, form, chunk_size=7, valid=101, temperature=0.7, tolerance=1e-12
    )
    _, logprobs, _ = expected_loss(hidden @ weight.t(), inputs, objective, temperature=0.7)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective)
    torch.testing.assert_close(found.log_ratio, terms.log_ratio)
    assert torch.equal(found.clipped, terms.clipped)
    assert torch.equal(found.clamped, terms.clamped)
    if name == "narrow":
        assert found.clipped.any()
        assert found.clamped.any()
        assert not (found.clipped & inputs.replayed).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("vocab", "valid"), [(101, 101), (128, 101), (1, 1), (32_000, 32_000), (151_936, 151_643)])
def test_float32_is_float64_to_six_digits_for_any_vocabulary(form: str, vocab: int, valid: int):
    """The last token's target is the last valid column. With fewer than about 64 hidden units torch's own products over
    150,000 columns are off by 1e-5."""
    tokens = 12 if vocab > 1000 else 60
    hidden, weight = random_layer(tokens, 64, vocab, logit_scale=3.0, dtype=torch.float32)
    inputs = random_inputs(tokens, valid)
    inputs.targets[-1] = valid - 1
    assert_as_float64(hidden, weight, inputs, Objective(), form, chunk_size=5, valid=valid)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["ten thousand", "peaked", "far below"])
def test_float32_keeps_its_digits_on_adversarial_rows(form: str, temperature: float, kind: str):
    """Logits are hidden @ identity, so that float32 logits are exact: all near 1e4; one far above the others; columns
    of -1e30, which no probability is left for."""
    logits = random_layer(20, 50, 1)[0].detach().float() * 3
    if kind == "ten thousand":
        logits += 1e4
    elif kind == "peaked":
        logits[:, 7] += 60
    else:
        logits[:, 20:] = -1e30
    inputs = random_inputs(20, 20)
    inputs.targets[::3] = 7
    inputs = replace(inputs, old_logprobs=expected_loss(logits, inputs, Objective(), temperature=temperature)[1])
    hidden, weight = logits.requires_grad_(), torch.eye(50).requires_grad_()
    if kind == "far below":  # its square is no float32: the gradient of the weight is inf in any implementation
        weight.requires_grad_(False)
    exact = logits.detach().double().requires_grad_()
    loss, logprobs, entropies = expected_loss(exact, inputs, Objective(), temperature=temperature)
    loss.backward()
    head = OutputHead(weight, valid_vocab=50, temperature=temperature)
    found = fused.token_loss(hidden, head, in_dtype(inputs, torch.float32), Objective(), form=form)
    found.loss.backward()
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropies.double(), entropies, rtol=1e-6, atol=1e-6)
    assert (hidden.grad.double() - exact.grad).abs().max() < 1e-5 * exact.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_given_logits(dtype: torch.dtype):
    """-inf columns among them; 3 columns are padding, whose gradient is exactly 0."""
    logits = (random_layer(30, 43, 1)[0].detach() * 4).to(dtype)
    logits[:, 5:9] = -torch.inf
    inputs = random_inputs(30, 5)
    exact = logits.double().requires_grad_()
    loss, logprobs, entropies = expected_loss(exact, inputs, Objective(), temperature=0.8, valid=40)
    (3 * loss).backward()
    given = logits.clone().requires_grad_()
    handed_over = given * 1
    found = fused.logits_loss(handed_over, Columns(40, temperature=0.8), in_dtype(inputs, torch.float32), Objective())
    (3 * found.loss).backward()
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.entropies.double(), entropies, rtol=1e-6, atol=1e-6)
    error = (given.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2**-7)  # two roundings to 8 bits
    assert not given.grad[:, 40:].any()
    assert torch.equal(handed_over.detach(), given.grad)


@pytest.mark.parametrize("name", ["ratio", "nll"])
@pytest.mark.parametrize(("dtype", "constants", "digits"), [
    (torch.float64, torch.float32, 1e-12), (torch.float32, torch.float64, 1e-5),
])  # fmt: skip
def test_constants_may_be_of_another_precision_than_the_logits(
    name: str, dtype: torch.dtype, constants: torch.dtype, digits: float
):
    """float64 logits keep their digits beside the float32 constants of a batch; all are what float64 makes of them."""
    hidden, weight = random_layer(7, 5, 11, dtype=dtype)
    inputs = in_dtype(random_inputs(7, 11), constants)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected_loss(exact[0] @ exact[1].t(), inputs, OBJECTIVES[name], valid=9)[0].backward()
    head = OutputHead(weight, valid_vocab=9)
    fused.token_loss(hidden, head, inputs, OBJECTIVES[name], chunk_size=3).loss.backward()
    for found, wanted in zip((hidden, weight), exact, strict=True):
        assert (found.grad.double() - wanted.grad).abs().max() < digits * wanted.grad.abs().max()


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(form: str, tokens: int):
    hidden, weight = random_layer(tokens, 4, 11, dtype=torch.float32)
    inputs = random_inputs(tokens, 11)
    if tokens:
        assert_as_float64(hidden, weight, inputs, Objective(), form)
        return
    found = fused.token_loss(hidden, OutputHead(weight, 11), in_dtype(inputs, torch.float32), Objective(), form=form)
    found.loss.backward()
    assert found.loss.item() == 0
    assert found.logprobs.shape == found.clipped.shape == (0,)
    assert torch.equal(weight.grad, torch.zeros(11, 4))
    assert hidden.grad.shape == (0, 4)


def test_70_000_tokens_of_a_small_vocabulary():
    """More than the 65,535 blocks of one dimension of a CUDA grid."""
    hidden, weight = random_layer(70_000, 64, 37, dtype=torch.float32)
    assert_as_float64(hidden, weight, random_inputs(70_000, 37), Objective(), "auto")


def test_a_single_token_with_a_weight_alone_has_a_gradient():
    hidden, weight = random_layer(9, 4, 13, dtype=torch.float32)
    inputs = random_inputs(9, 13)
    only = torch.zeros(9, dtype=torch.float64).index_fill_(0, torch.tensor([4]), 1.0)
    inputs = replace(inputs, policy_weights=only, entropy_weights=only)
    assert_as_float64(hidden, weight, inputs, Objective(), "linear", chunk_size=2)
    fused.token_loss(hidden, OutputHead(weight, 13), in_dtype(inputs, torch.float32), Objective()).loss.backward()
    assert hidden.grad.any(dim=1).tolist() == [number == 4 for number in range(9)]


@pytest.mark.parametrize("form", FORMS)
def test_an_entropy_bonus_makes_the_entropy_grow(form: str):
    """One token, logits (2, 0), no advantage: dH/dz_0 = -p_0 (log p_0 + H) = -p_0 (1 - p_0) 2 = -0.20999 by hand, and
    the loss subtracts the entropy."""
    logits, weight = torch.tensor([[2.0, 0.0]], requires_grad=True), torch.eye(2)
    one, none = torch.ones(1), torch.zeros(1)
    inputs = LossInputs(torch.tensor([0]), none, none, torch.tensor([False]), one, one)
    fused.token_loss(logits, OutputHead(weight, 2), inputs, Objective(), form=form).loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.20999, -0.20999]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("target", [9, 12, -1])
def test_a_target_outside_the_vocabulary_is_refused(form: str, target: int):
    """In a padded column, and in none."""
    hidden, weight = random_layer(3, 4, 12, dtype=torch.float32)
    inputs = in_dtype(random_inputs(3, 9), torch.float32)
    inputs.targets[1] = target
    with pytest.raises((RuntimeError, IndexError), match=r"not in the vocabulary|out of bounds"):
        fused.token_loss(hidden, OutputHead(weight, 9), inputs, Objective(), form=form)


@pytest.mark.parametrize(("temperature", "valid"), [(0.0, 11), (-1.0, 11), (1.0, 12), (1.0, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_a_temperature_or_vocabulary_out_of_range_is_refused(form: str, temperature: float, valid: int):
    hidden, weight = random_layer(3, 4, 11, dtype=torch.float32)
    head = OutputHead(weight, valid, temperature=temperature)
    with pytest.raises(ValueError, match="must be"):
        fused.score(hidden, head, torch.zeros(3, dtype=torch.long), form=form)


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_the_log_probs_and_entropies_of_the_loss(form: str):
    hidden, weight = random_layer(30, 8, 53, dtype=torch.float32)
    inputs = in_dtype(random_inputs(30, 50), torch.float32)
    head = OutputHead(weight, 50, temperature=0.9)
    logprobs, entropies = fused.score(hidden, head, inputs.targets, form=form, chunk_size=8)
    found = fused.token_loss(hidden, head, inputs, Objective(), form=form, chunk_size=8)
    torch.testing.assert_close(logprobs, found.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies, found.entropies, rtol=0, atol=2e-6)
    assert not logprobs.requires_grad


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_recomputed_gradients_are_those_of_any_loss(used: tuple[bool, bool]):
    """Gradcheck in float64 of (log-prob squared, entropy to the third), 2 of 5 tokens a chunk."""
    hidden, weight = random_layer(5, 3, 9)
    targets = random_inputs(5, 7).targets

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropies = fused.logprobs(hidden, OutputHead(weight, 7, temperature=0.7), targets, chunk_size=2)
        return used[0] * logprobs.square().sum() + used[1] * entropies.pow(3).sum()

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_added_to_main_grad(form: str, dtype: torch.dtype):
    """In float32 whatever the weight is in: within 1e-5 of float64 on the same weights, where rounding to bfloat16
    would be off by 2e-3. Autograd sees zeros, so the weight's hooks run; what was there stays."""
    hidden, weight = random_layer(20, 8, 37, dtype=dtype)
    inputs, main_grad = random_inputs(20, 30), torch.ones(37, 8)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    loss, logprobs, _ = expected_loss(exact[0] @ exact[1].t(), inputs, Objective(), valid=30)
    (2 * loss).backward()
    head = OutputHead(weight, 30, main_grad=main_grad)
    hooked = []
    weight.register_hook(lambda gradient: hooked.append(gradient.dtype))
    found = fused.token_loss(hidden, head, in_dtype(inputs, torch.float32), Objective(), form=form, chunk_size=6)
    (2 * found.loss).backward()
    assert hooked == [dtype]
    assert not weight.grad.any()
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-6, atol=1e-6)
    scale = exact[1].grad.abs().max()
    assert ((main_grad - 1).double() - exact[1].grad).abs().max() < 1e-5 * scale + 1e-6
    error = (hidden.grad.double() - exact[0].grad).abs().max() / exact[0].grad.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2**-7)


def test_a_tied_weight_gets_both_gradients():
    """The same parameter as embedding and output layer, float64: as autograd of the plain loss."""
    _, weight = random_layer(6, 5, 11)
    inputs, ids = random_inputs(6, 11), torch.tensor([0, 3, 3, 7, 10, 1])
    found = fused.token_loss(weight[ids].tanh(), OutputHead(weight, 11), inputs, Objective(), chunk_size=4)
    found.loss.backward()
    plain = weight.detach().clone().requires_grad_()
    expected_loss(plain[ids].tanh() @ plain.t(), inputs, Objective())[0].backward()
    torch.testing.assert_close(weight.grad, plain.grad)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str):
    hidden, weight = random_layer(6, 5, 11)
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    inputs = random_inputs(6, 11)
    fused.token_loss(hidden, OutputHead(weight, 11), inputs, Objective()).loss.backward()
    assert (hidden.grad is None, weight.grad is None) == (frozen == "hidden", frozen == "weight")
    with torch.no_grad():
        assert not fused.token_loss(hidden, OutputHead(weight, 11), inputs, Objective()).loss.requires_grad


def test_rows_of_some_columns_stay_as_far_apart_in_16_bits():
    """Of 128 columns 101 are no padding: narrow rows would begin at multiples of 202 bytes."""
    logits = torch.randn(3, 128)[:, :101]
    lower = products.with_same_strides(logits, torch.bfloat16)
    assert lower.stride() == (128, 1)
    assert torch.equal(lower, logits.bfloat16())
    assert products.with_same_strides(logits, torch.float32) is logits


def test_16_bit_weights_are_converted_in_one_place_however_many_chunks_there_are(monkeypatch: pytest.MonkeyPatch):
    """A new one for every chunk left holes between the results, and memory grew as the logits of all tokens would."""
    monkeypatch.setattr(products, "_CONVERTED_ELEMENTS", 40_000)
    hidden, weight = random_layer(20, 64, 3001, dtype=torch.bfloat16)
    inputs = in_dtype(random_inputs(20, 3001), torch.float32)
    head = OutputHead(weight, 3001)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fused.token_loss(hidden, head, inputs, Objective(), chunk_size=4)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes.count(4 * 40_000) == 1, "40,000 numbers of float32: 625 of 3001 columns at a time"


@pytest.mark.parametrize("of", ["hidden states", "logits"])
def test_gradients_are_handed_out_once(of: str):
    hidden, weight = random_layer(6, 5, 11)
    inputs = random_inputs(6, 11)
    if of == "logits":
        loss = fused.logits_loss(hidden @ weight.t(), Columns(11), inputs, Objective()).loss
    else:
        loss = fused.token_loss(hidden, OutputHead(weight, 11), inputs, Objective()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward pass"):
        loss.backward()


def test_blocks_of_rows_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch):
    """5 rows a block or all 40 at once."""

    def run() -> list[Tensor]:
        hidden, weight = random_layer(40, 8, 64, dtype=torch.float32)
        inputs = in_dtype(random_inputs(40, 64), torch.float32)
        found = fused.token_loss(hidden, OutputHead(weight, 64), inputs, Objective())
        found.loss.backward()
        return [found.logprobs, found.entropies, hidden.grad, weight.grad]

    whole = run()
    monkeypatch.setattr(torch_kernels, "_BLOCK_ELEMENTS", 5 * 64)
    for blocked, expected in zip(run(), whole, strict=True):
        assert torch.equal(blocked, expected)


@pytest.mark.parametrize(
    ("hidden", "columns", "rows"),
    [(128, 32, 262144), (128, 1024, 8192), (512, 32768, 256), (1024, 151936, 204), (8192, 151936, 1024),
     (64, 151936, 55)],
)  # fmt: skip
def test_chunks_are_sized_by_hand(hidden: int, columns: int, rows: int):
    """A fifth of hidden but at most 1024, or as many as have 2^23 logits if that is more."""
    assert default_chunk_rows(hidden, columns) == rows
