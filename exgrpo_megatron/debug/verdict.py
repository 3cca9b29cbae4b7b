"""What makes an optimiser step bad."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from exgrpo_megatron.config import DebugConfig
from exgrpo_megatron.types import UpdateResult


@dataclass(frozen=True)
class RatioExtremes:
    """Of the response tokens of one data-parallel rank."""

    largest_log: float
    num_not_finite: int


def ratio_extremes(result: UpdateResult) -> RatioExtremes:
    logs = result.terms.log_ratio
    finite = logs[np.isfinite(logs)]
    return RatioExtremes(float(finite.max(initial=-math.inf)), len(logs) - len(finite))


def faults(config: DebugConfig, result: UpdateResult, ratios: RatioExtremes) -> list[str]:
    """Why an optimiser step is bad, with the numbers; empty where it is not. `ratios`: over all ranks."""
    found = []
    if not math.isfinite(result.loss):
        found.append(f"loss {result.loss}")
    elif config.max_abs_loss is not None and abs(result.loss) > config.max_abs_loss:
        found.append(f"loss {result.loss:.4g} beyond debug.max_abs_loss = {config.max_abs_loss:g}")
    if not math.isfinite(result.grad_norm):
        found.append(f"gradient norm {result.grad_norm}")
    elif config.max_grad_norm is not None and result.grad_norm > config.max_grad_norm:
        found.append(f"gradient norm {result.grad_norm:.4g} above debug.max_grad_norm = {config.max_grad_norm:g}")
    if result.skipped:
        found.append("skipped")
    if ratios.num_not_finite:
        found.append(f"{ratios.num_not_finite} log-ratios that are not finite")
    if config.max_ratio is not None and ratios.largest_log > math.log(config.max_ratio):
        found.append(f"log-ratio {ratios.largest_log:.4g} above that of debug.max_ratio = {config.max_ratio:g}")
    return found
