"""Transformer Engine's own Triton cross-entropy as an independent implementation, loaded by path and interpreted.

Its file imports nothing but triton; the package around it cannot be imported without its compiled libraries. It has no
entropy, temperature or padding, so those are not compared.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from interpreted import needs_interpreter, shards

KERNELS = ("cross_entropy_tp_pre_kernel", "cross_entropy_tp_post_kernel", "cross_entropy_backward_kernel")
BLOCK = 1024


def cross_entropy_file() -> Path | None:
    """Of the installed distribution, where it has one; nothing of it is imported."""
    found = importlib.util.find_spec("transformer_engine")
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder) / "common" / "triton" / "cross_entropy.py"
        if path.exists():
            return path
    return None


pytestmark = [
    *needs_interpreter,
    pytest.mark.skipif(cross_entropy_file() is None, reason="no transformer-engine with a Triton cross-entropy"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    path = cross_entropy_file()
    assert path is not None
    spec = importlib.util.spec_from_file_location("te_cross_entropy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [name for name in KERNELS if not hasattr(module, name)]
    if missing:
        pytest.skip(f"another version of Transformer Engine: {path} has no {missing}")
    return module


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_statistics_log_probs_and_gradients_agree_with_transformer_engine(oracle: ModuleType, ranks: int):
    from exgrpo_kernels import triton_kernels

    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 5120, generator=generator)
    targets = torch.randint(0, 5120, (6,), generator=generator)
    upstream = torch.randn(6, generator=generator)
    theirs_loss, theirs_local, theirs_gradient = theirs(oracle, logits, targets, upstream, ranks)

    parts = shards(logits, ranks, 5120)
    options = [{"temperature": 1.0, "valid": part.valid, "vocab_start": part.vocab_start} for part in parts]
    both = list(zip(parts, options, strict=True))
    statistics = torch.stack([triton_kernels.row_statistics(part.logits, targets, **option) for part, option in both])
    logprobs, _ = triton_kernels.logprob_entropy(statistics, temperature=1.0)
    for part, option in both:
        triton_kernels.write_gradient(part.logits, statistics, targets, -upstream, None, **option)
    gradient = torch.cat([part.logits for part in parts], dim=1)

    assert torch.equal(statistics[:, :, 0], theirs_local[:, :, 0])
    torch.testing.assert_close(statistics[:, :, 1], theirs_local[:, :, 1], rtol=2e-6, atol=0)
    torch.testing.assert_close(-logprobs, theirs_loss, rtol=1e-6, atol=1e-6)
    largest = theirs_gradient.abs().amax(dim=1, keepdim=True)
    assert ((gradient - theirs_gradient).abs() / largest).max() < 1e-5


def theirs(oracle: ModuleType, logits: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor, ranks: int):
    """Loss of each row, [ranks, rows, 4] of the columns of each rank, and the gradient of the weighted losses."""
    rows = len(logits)
    parts = [part.logits for part in shards(logits, ranks, logits.shape[1])]
    width = parts[0].shape[1]
    count, local = torch.zeros(1, dtype=torch.int64), torch.zeros(ranks, rows, 4)
    for rank, part in enumerate(parts):
        oracle.cross_entropy_tp_pre_kernel[(rows,)](
            part, width, width, 1, part, targets, local[rank], count, rank, width, 1, -100,
            COUNT_NON_IGNORE=False, COMPUTE_X_SUM=False, COPY_INPUT=False, BLOCK_SIZE=BLOCK,
        )  # fmt: skip
    loss, statistics = torch.empty(rows), torch.empty(rows, 2)
    oracle.cross_entropy_tp_post_kernel[(rows,)](
        local, targets, loss, statistics, ranks, rows, width, -100, label_smoothing=0.0
    )
    for rank, part in enumerate(parts):
        oracle.cross_entropy_backward_kernel[(rows,)](
            part, targets, statistics, count, upstream, 1, rank, ranks, width, -100,
            reduce_loss=False, label_smoothing=0.0, BLOCK_SIZE=BLOCK,
        )  # fmt: skip
    return loss, local, torch.cat(parts, dim=1)
