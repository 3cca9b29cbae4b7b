"""The Triton kernels on columns shared by the launched ranks, with their one exchange; interpreted on the CPU."""

import torch
import torch.distributed as dist
from interpreted import exact, gradient_error, random_inputs, relative, shards

from exgrpo_kernels import statistics, triton_kernels
from exgrpo_kernels.reference import Objective

VALID = 700
TEMPERATURE = 0.8


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = 3 * torch.randn(6, 768, generator=torch.Generator().manual_seed(0))
    inputs = random_inputs(logits, valid=VALID, temperature=TEMPERATURE)
    expected = exact(logits, inputs, Objective(), temperature=TEMPERATURE, valid=VALID)
    part = shards(logits, size, VALID)[rank]
    options = {"temperature": TEMPERATURE, "valid": part.valid, "vocab_start": part.vocab_start}
    parts = statistics.gather(triton_kernels.row_statistics(part.logits, inputs.targets, **options), dist.group.WORLD)
    found = triton_kernels.loss_and_gradient(
        part.logits, parts, inputs.targets, inputs, Objective(), **options, write_gradient=True
    )
    here = expected.gradient[:, part.vocab_start : part.vocab_start + part.logits.shape[1]]
    assert relative(found.logprobs, expected.logprobs) < 1e-6
    assert relative(found.entropies, expected.entropies) < 1e-6
    assert relative(found.loss, expected.loss) < 3e-6
    assert gradient_error(part.logits, here, inputs, TEMPERATURE) < 1e-5
    everyone = [torch.empty_like(found.loss) for _ in range(size)]
    dist.all_gather(everyone, found.loss)
    assert all(torch.equal(other, everyone[0]) for other in everyone), "ranks got different losses"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
