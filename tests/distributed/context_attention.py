"""Context-parallel attention against attention on one process; run by test_context_attention.py under `launch`."""

import torch
import torch.distributed as dist

from exgrpo_megatron.policy.attention import causal_attention
from exgrpo_megatron.policy.grouping import zigzag

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def main() -> None:
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    for dtype in TOLERANCE:
        # Padded rows are one sequence with a batch; packed rows are several sequences without.
        for batch, lengths in ((3, [8 * size]), (1, [4 * size, 2 * size, 10 * size])):
            compare(batch, lengths, dtype, torch.from_numpy(zigzag(lengths, size, rank)))
    dist.barrier()
    dist.destroy_process_group()


def compare(batch: int, lengths: list[int], dtype: torch.dtype, own: torch.Tensor) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(sum(lengths), batch, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(sum(lengths), batch, 4, 8, dtype=dtype)
    expected = causal_attention(*whole, lengths)
    theirs = torch.autograd.grad((expected * upstream).sum(), whole)

    mine = [tensor.detach()[own].requires_grad_() for tensor in whole]
    result = causal_attention(*mine, lengths, group=dist.group.WORLD)
    gradients = torch.autograd.grad((result * upstream[own]).sum(), mine)
    torch.testing.assert_close(result, expected[own], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for gradient, other in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(gradient, other[own], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


if __name__ == "__main__":
    main()
