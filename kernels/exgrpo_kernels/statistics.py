"""Four numbers of a row that every probability, log-prob and entropy follows from, also where ranks share the row.

Of a row of logits x, with m = max x and z = (x - m) / temperature: `m`, `s = sum exp(z)`, `e = sum exp(z) z`, and `t`,
the target's x. `m` and `t` are in the logits' own units, before the division by the temperature: their difference is
exact, and no digits go where logits are large. A rank whose columns do not include the target has NaN for `t`; one
without columns, or with nothing but -inf, has the lowest of all numbers for `m`, and `s = e = 0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

LOWEST_EXPONENT = -1e4
"""Exponents are clamped to this from below: exp is 0 there in float32 and float64, and 0 times it is 0, not NaN."""


@dataclass(frozen=True)
class RowStatistics:
    """Of whole rows."""

    maxima: Float[Tensor, " rows"]
    sums: Float[Tensor, " rows"]
    log_sums: Float[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]


def gather(partials: Float[Tensor, "rows 4"], group: dist.ProcessGroup | None) -> Float[Tensor, "ranks rows 4"]:
    """The four numbers of every rank of the group, in the order of ranks: one collective."""
    if group is None or dist.get_world_size(group) == 1:
        return partials[None]
    gathered = partials.new_empty(dist.get_world_size(group), *partials.shape)
    dist.all_gather(list(gathered.unbind()), partials.contiguous(), group=group)
    return gathered


def merge(partials: Float[Tensor, "ranks rows 4"], temperature: float) -> RowStatistics:
    """Of whole rows, from those of the ranks' columns: shift each to the common maximum, then add.

    With d = (m - M) / temperature, M the maximum of whole rows: exp((x - M) / temperature) = exp(z) exp(d), and
    (x - M) / temperature = z + d.
    """
    maxima, sums, moments, targets = partials.unbind(2)
    if len(partials) == 1:
        common, total, moment, target = maxima[0], sums[0], moments[0], targets[0]
    else:
        common = maxima.amax(0)
        shift = (maxima - common).div_(temperature).clamp_(min=LOWEST_EXPONENT)
        scale = shift.exp()
        total = (sums * scale).sum(0)
        moment = ((moments + shift * sums) * scale).sum(0)
        target = targets.where(~targets.isnan(), -torch.inf).amax(0)
    log_sums, above = total.log(), target - common
    if temperature != 1:
        above.div_(temperature)
    # (t - m) - log s keeps its digits where t - (m + log s) loses them to a large m.
    return RowStatistics(common, total, log_sums, logprobs=above.sub_(log_sums), entropies=log_sums - moment / total)
