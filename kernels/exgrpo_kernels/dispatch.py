"""Which implementation of the two passes over logits runs on a device."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from exgrpo_kernels import torch_kernels
from exgrpo_kernels.reference import Objective
from exgrpo_kernels.types import LossInputs, TokenLoss

_log = logging.getLogger(__name__)


class RowKernels(Protocol):
    """`torch_kernels` or `triton_kernels`: the same functions, documented in the former."""

    def row_statistics(
        self, logits: Tensor, targets: Tensor, *, temperature: float, valid: int, vocab_start: int
    ) -> Tensor: ...

    def logprob_entropy(self, statistics: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]: ...

    def loss_and_gradient(
        self,
        logits: Tensor,
        statistics: Tensor,
        targets: Tensor,
        inputs: LossInputs,
        objective: Objective,
        *,
        temperature: float,
        valid: int,
        vocab_start: int,
        write_gradient: bool,
    ) -> TokenLoss: ...

    def write_gradient(
        self,
        logits: Tensor,
        statistics: Tensor,
        targets: Tensor,
        logprob_gradients: Tensor,
        entropy_gradients: Tensor | None,
        *,
        temperature: float,
        valid: int,
        vocab_start: int,
    ) -> None: ...


def row_kernels(logits: Tensor) -> RowKernels:
    """Triton on GPUs that have it, for all but float64; torch elsewhere. A GPU without Triton is warned of once."""
    if not logits.is_cuda or logits.dtype == torch.float64:
        return torch_kernels
    return triton_kernels() or torch_kernels


@cache
def triton_kernels() -> ModuleType | None:
    """The module of that name; None, with a warning, where triton is absent or does not import."""
    fault = "triton is not installed"
    if importlib.util.find_spec("triton") is not None:
        try:
            return importlib.import_module("exgrpo_kernels.triton_kernels")
        except (ImportError, AttributeError, OSError, RuntimeError) as error:  # as packages that are there in part
            fault = f"triton does not import ({type(error).__name__}: {error})"
    _log.warning("%s: log-probs and losses on this GPU run in plain torch, slower", fault)
    return None
