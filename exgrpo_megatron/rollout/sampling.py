"""Drawing tokens: one stream of uniform numbers a sample, turned into token ids by the inverse of the distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits handled at once: bounds the 64-bit scratch space to about 100 MB whatever the batch and the vocabulary."""

_WEIGHT_SCALE = 2.0**44
"""Integer weight of the likeliest token; 2^18 tokens of this weight still sum to less than 2^63."""


def uniform_streams(seeds: Sequence[int], length: int) -> NDArray[np.float64]:
    """[seeds, length] uniforms in [0, 1): row i depends on seed i alone, and a longer row begins with the shorter one.

    PCG64 mixes the whole of a (non-negative, arbitrarily large) seed, so neighbouring seeds and seeds that differ in
    high bits only give independent rows.
    """
    streams = np.empty((len(seeds), length))
    for row, seed in zip(streams, seeds, strict=True):
        np.random.Generator(np.random.PCG64(seed)).random(out=row)
    return streams


def choose_tokens(
    logits: Float[Tensor, "rows vocab"], temperature: float, uniforms: Float[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """One token a row, and its float32 log-prob under softmax(logits / temperature).

    Temperature 0 takes the largest logit (the lowest id among equals), ignores `uniforms`, and gives log-probs of
    softmax(logits). Logits that are not finite give a log-prob that is not finite.
    """
    rows_at_once = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    if len(logits) <= rows_at_once:
        return _choose(logits, temperature, uniforms)
    pairs = zip(logits.split(rows_at_once), uniforms.split(rows_at_once), strict=True)
    ids, logprobs = zip(*(_choose(some, temperature, numbers) for some, numbers in pairs), strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _choose(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = scaled.exp()
    ids = scaled.argmax(dim=-1, keepdim=True) if temperature == 0.0 else _inverse_cdf(weights, uniforms)
    logprobs = scaled.gather(1, ids) - weights.sum(dim=-1, keepdim=True).log()
    return ids.squeeze(1), logprobs.squeeze(1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id [rows, 1] whose cumulative weight exceeds uniform * total.

    Weights become integers, so that the cumulative sum is exact, monotone and the same in every order of summation: a
    token of weight 0 (below 2^-44 of the likeliest) is never drawn, and the sum is never exhausted. The error of
    2^-44 a token is far below that of float32 logits.
    """
    cumulative = (weights.double() * _WEIGHT_SCALE).long().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # A product that rounds up to the total would fall off the end.
    targets = torch.minimum((uniforms[:, None] * total).long(), total - 1)
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=weights.shape[1] - 1)
