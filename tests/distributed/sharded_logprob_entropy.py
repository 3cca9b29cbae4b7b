"""Log-prob and entropy of columns shared by the launched ranks, held to those of whole rows on every rank."""

import pytest
import torch
import torch.distributed as dist

from exgrpo_kernels.reference import logprob_entropy

CASES = {
    "all columns used": (24, 24, 3.0),
    "padded within the last shard": (24, 21, 3.0),
    "last shard all padding": (24, 12, 3.0),
    "one column used": (24, 1, 3.0),
    "large logits": (24, 21, 1e4),
}


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, (columns, valid, scale) in CASES.items():
        for temperature in (1.0, 0.6):
            check(name, columns, valid, scale, temperature, rank, size)
    minus_infinity(rank, size)
    refused_target(rank)
    dist.barrier()
    dist.destroy_process_group()


def check(name: str, columns: int, valid: int, scale: float, temperature: float, rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(50, columns, generator=generator) * scale
    targets = torch.randint(0, valid, (50,), generator=generator)
    upstream = torch.randn(2, 50, generator=generator)
    expected, expected_grad = run(whole, targets, upstream, temperature=temperature, valid_vocab=valid)
    width = columns // size
    mine = whole[:, rank * width : (rank + 1) * width]
    found, grad = run(
        mine, targets, upstream, temperature=temperature, valid_vocab=valid, group=dist.group.WORLD,
        vocab_start=rank * width,
    )  # fmt: skip
    expected_grad = expected_grad[:, rank * width : (rank + 1) * width]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6, msg=lambda text: f"{name}: {text}")
    torch.testing.assert_close(grad, expected_grad, rtol=4e-6, atol=2e-6, msg=lambda text: f"{name}: {text}")
    assert not grad[:, max(0, valid - rank * width) :].any(), "a padded column has a gradient"
    everyone = [torch.empty_like(torch.stack(found)) for _ in range(size)]
    dist.all_gather(everyone, torch.stack(found))
    assert all(torch.equal(other, everyone[0]) for other in everyone), "ranks got different outputs"


def run(logits, targets, upstream, **options):
    logits = logits.clone().requires_grad_()
    logprobs, entropies = logprob_entropy(logits, targets, **options)
    (logprobs * upstream[0] + entropies * upstream[1]).sum().backward()
    return (logprobs.detach(), entropies.detach()), logits.grad


def minus_infinity(rank: int, size: int) -> None:
    """Rank 0 holds nothing but -inf: a probability of 0 each, and the others' columns are the distribution."""
    logits = torch.full((1, 4), -torch.inf) if rank == 0 else torch.zeros(1, 4)
    targets = torch.tensor([4 * (size - 1)])
    if size == 1:
        return
    logprobs, entropies = logprob_entropy(
        logits, targets, valid_vocab=4 * size, group=dist.group.WORLD, vocab_start=4 * rank
    )
    expected = torch.tensor([4.0 * (size - 1)]).log()
    torch.testing.assert_close(logprobs, -expected)
    torch.testing.assert_close(entropies, expected)


def refused_target(rank: int) -> None:
    """A target in a padded column, which no rank would find."""
    with pytest.raises(RuntimeError, match="a target is not in the vocabulary"):
        logprob_entropy(
            torch.zeros(1, 4), torch.tensor([3]), valid_vocab=3, group=dist.group.WORLD, vocab_start=4 * rank
        )


if __name__ == "__main__":
    main()
