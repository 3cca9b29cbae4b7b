"""The fused loss of columns shared by the launched ranks, held on every rank to float64 autograd of whole rows."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from exgrpo_kernels import fused
from exgrpo_kernels.fused import Columns, LossInputs, Objective, OutputHead
from exgrpo_kernels.reference import token_terms

TOKENS, HIDDEN = 37, 64
CASES = {
    "all columns used": (104, 104, 2.0, 1.0),
    "padded within the last shard, with a temperature": (104, 101, 2.0, 0.6),
    "last shards all padding": (104, 20, 2.0, 1.0),
    "one column used": (104, 1, 2.0, 1.0),
    "peaked": (104, 101, 60.0, 1.0),
    "wide": (151_936, 151_643, 3.0, 1.0),
}


def main() -> None:
    dist.init_process_group("gloo")
    for name, (columns, valid, scale, temperature) in CASES.items():
        if columns > 1000 and dist.get_world_size() != 2:
            continue
        forms = ("linear",) if columns > 1000 else ("linear", "logits", "reference")
        for form in forms:
            check(f"{name}, {form}", columns, valid, scale, temperature, form)
    recomputed()
    given_logits()
    no_tokens()
    refused_target()
    dist.barrier()
    dist.destroy_process_group()


def problem(columns: int, valid: int, scale: float, temperature: float) -> tuple[Tensor, Tensor, LossInputs]:
    """The same on every rank, in float64. Ratios are around 1, and all factors are short enough for float32 logits to
    be exact, so that what is off is not the product."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    hidden = normal(TOKENS, HIDDEN).mul_(4).round_().div_(4)
    weight = normal(columns, HIDDEN).mul_(16 * scale / HIDDEN**0.5).round_().div_(16)
    targets = torch.randint(0, valid, (TOKENS,), generator=generator)
    targets[-1] = valid - 1
    logprobs = statistics(hidden @ weight.t(), targets, valid, temperature)[0]
    weights = torch.full((TOKENS,), 1 / 32, dtype=torch.float64)
    inputs = LossInputs(
        targets=targets,
        old_logprobs=(logprobs + 0.3 * normal(TOKENS)).float().double(),
        advantages=normal(TOKENS),
        replayed=torch.rand(TOKENS, generator=generator) < 0.4,
        policy_weights=weights,
        entropy_weights=weights / 16,
    )
    return hidden, weight, inputs


def statistics(logits: Tensor, targets: Tensor, valid: int, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs = (logits[:, :valid] / temperature).log_softmax(dim=1)
    return log_probs.gather(1, targets[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)


def expected_loss(logits: Tensor, inputs: LossInputs, valid: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, entropies = statistics(logits, inputs.targets, valid, temperature)
    terms = token_terms(logprobs, inputs.old_logprobs, inputs.advantages, inputs.replayed, Objective())
    loss = (inputs.policy_weights * terms.policy_loss - inputs.entropy_weights * entropies).sum()
    return loss, logprobs, entropies


def mine(columns: int) -> slice:
    width = columns // dist.get_world_size()
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def head_of(weight: Tensor, valid: int, temperature: float = 1.0, **options: object) -> OutputHead:
    start = dist.get_rank() * len(weight)
    return OutputHead(weight, valid, start, dist.group.WORLD, temperature=temperature, **options)


def in_float32(inputs: LossInputs) -> LossInputs:
    names = ("old_logprobs", "advantages", "policy_weights", "entropy_weights")
    return replace(inputs, **{name: getattr(inputs, name).float() for name in names})


def check(name: str, columns: int, valid: int, scale: float, temperature: float, form: str) -> None:
    """Log-probs and entropies to 1e-6, gradients to 1e-5 of the largest. A third of the hidden states' gradient is left
    to the caller to sum, as with sequence parallelism; the weight's is added to ones on odd ranks."""
    hidden, weight, inputs = problem(columns, valid, scale, temperature)
    hidden.requires_grad_(), weight.requires_grad_()
    loss, logprobs, entropies = expected_loss(hidden @ weight.t(), inputs, valid, temperature)
    loss.backward()
    for reduced in (True, False):
        states = hidden.detach().float().requires_grad_()
        part = weight.detach()[mine(columns)].float().requires_grad_()
        main_grad = torch.ones_like(part) if dist.get_rank() % 2 else None
        head = head_of(part, valid, temperature, reduce_hidden_grad=reduced, main_grad=main_grad)
        chunked = {} if form == "reference" else {"chunk_size": 10}
        found = fused.token_loss(states, head, in_float32(inputs), Objective(), form=form, **chunked)
        found.loss.backward()
        if not reduced:
            dist.all_reduce(states.grad)
        grad = part.grad if main_grad is None else main_grad - 1
        close(name, found.logprobs, logprobs, 1e-6)
        close(name, found.entropies, entropies, 1e-6)
        near(name, states.grad, hidden.grad)
        near(name, grad, weight.grad[mine(columns)], largest=weight.grad, slack=0.0 if main_grad is None else 1e-6)
        assert not part.grad[max(0, valid - head.vocab_start) :].any(), f"{name}: a padded column has a gradient"
    everyone = [torch.empty_like(found.logprobs) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, found.logprobs)
    assert all(torch.equal(other, everyone[0]) for other in everyone), f"{name}: ranks got different outputs"


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        found.double(), expected.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def near(name: str, found: Tensor, expected: Tensor, *, largest: Tensor | None = None, slack: float = 0.0) -> None:
    scale = float((expected if largest is None else largest).abs().max())
    error = float((found.double() - expected).abs().max())
    assert error <= 1e-5 * scale + slack + 1e-12, f"{name}: gradient off by {error} of {scale}"


def recomputed() -> None:
    """Gradients of squared log-probs and cubed entropies."""
    hidden, weight, inputs = problem(104, 101, 2.0, 0.8)
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropies = statistics(hidden @ weight.t(), inputs.targets, 101, 0.8)
    (logprobs.square().sum() + entropies.pow(3).sum()).backward()
    states = hidden.detach().requires_grad_()
    part = weight.detach()[mine(104)].clone().requires_grad_()
    head = head_of(part, 101, 0.8, reduce_hidden_grad=True)
    found = fused.logprobs(states, head, inputs.targets, chunk_size=10)
    (found[0].square().sum() + found[1].pow(3).sum()).backward()
    torch.testing.assert_close(states.grad, hidden.grad)
    torch.testing.assert_close(part.grad, weight.grad[mine(104)])
    for ours, theirs in zip(
        fused.score(states, head, inputs.targets, chunk_size=10), (logprobs, entropies), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def given_logits() -> None:
    """Rank 0 holds nothing but -inf: a probability of 0 each, and the others' columns are the distribution."""
    if dist.get_world_size() == 1:
        return
    hidden, weight, inputs = problem(104, 104, 2.0, 1.0)
    logits = hidden @ weight.t()
    logits[:, : 104 // dist.get_world_size()] = -1e5  # their log-prob is finite in log_softmax, their probability 0
    inputs.targets.clamp_(min=60)
    logits.requires_grad_()
    loss, logprobs, entropies = expected_loss(logits, inputs, 104, 1.0)
    loss.backward()
    given = logits.detach()[:, mine(104)].float()
    given[given == -1e5] = -torch.inf
    given.requires_grad_()
    columns = Columns(104, mine(104).start, dist.group.WORLD)
    found = fused.logits_loss(given * 1, columns, in_float32(inputs), Objective())
    found.loss.backward()
    close("-inf shard", found.logprobs, logprobs, 1e-6)
    close("-inf shard", found.entropies, entropies, 1e-6)
    near("-inf shard", given.grad, logits.grad[:, mine(104)], largest=logits.grad)


def no_tokens() -> None:
    none = torch.zeros(0)
    part = torch.ones(8, 4, requires_grad=True)
    inputs = LossInputs(none.long(), none, none, none.bool(), none, None)
    head = head_of(part, 8 * dist.get_world_size(), reduce_hidden_grad=True)
    loss = fused.token_loss(torch.zeros(0, 4, requires_grad=True), head, inputs, Objective()).loss
    loss.backward()
    assert loss.item() == 0
    assert not part.grad.any()


def refused_target() -> None:
    """A target in a padded column, which no rank would find."""
    one = torch.ones(1)
    inputs = LossInputs(torch.tensor([3]), one, one, one.bool(), one, None)
    head = head_of(torch.ones(4, 2), 3)
    with pytest.raises(RuntimeError, match="a target is not in the vocabulary"):
        fused.token_loss(torch.ones(1, 2), head, inputs, Objective())


if __name__ == "__main__":
    main()
