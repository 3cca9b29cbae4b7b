"""Forward passes of a dense decoder with a key-value cache: whole prompts, then one token a row."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.rollout.kv_cache import KVCache
from exgrpo_megatron.rollout.packed_weights import LayerWeights, PackedWeights

_Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [..., heads, dim], keys and values [2, ..., heads, dim]) -> attended values [..., heads * dim]."""


class Decoder:
    """Qwen2, Qwen3 and Llama forward passes over one set of weights. Call in inference mode."""

    def __init__(self, arch: Architecture, weights: PackedWeights) -> None:
        self.arch = arch
        self.weights = weights
        self._inverse_frequencies = rotary_inverse_frequencies(arch).to(weights.embedding.device)

    def prefill(
        self,
        tokens: Int[Tensor, "prompts width"],
        lengths: Int[Tensor, " prompts"],
        repeats: Int[Tensor, " prompts"],
        cache: KVCache,
        first_row: int,
    ) -> Float[Tensor, "rows vocab"]:
        """Run right-padded prompts once and give each `repeats` consecutive cache rows, starting at `first_row`.

        Returns the logits after each prompt's last token, repeated likewise. Padding never reaches a real position:
        it stands to the right of all of them under a causal mask.
        """

        def attend(layer: int, queries: Tensor, kv: Tensor) -> Tensor:
            kv = kv.transpose(2, 3)
            cache.write_prompts(layer, first_row, repeats, kv)
            keys, values = kv
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
            )
            return attended.transpose(1, 2).flatten(-2)

        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self._layers(tokens, positions, attend)
        last = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
        return self._logits(last).repeat_interleave(repeats, dim=0)

    def step(
        self,
        tokens: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        cache: KVCache,
        mask: Float[Tensor, "rows 1 1 columns"] | None,
    ) -> Float[Tensor, "rows vocab"]:
        """Append one token to every cache row; the logits after it. `mask` is added to the attention scores."""
        cache.open_column()
        visible = None if mask is None else mask[..., : cache.num_columns]

        def attend(layer: int, queries: Tensor, kv: Tensor) -> Tensor:
            keys, values = cache.append(layer, kv)
            # The query heads that share a key-value head stand in the place of query positions: no copy of the cache.
            grouped = queries.unflatten(1, (self.arch.num_kv_heads, -1))
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible).flatten(1)

        return self._logits(self._layers(tokens, positions, attend))

    def _layers(self, tokens: Tensor, positions: Tensor, attend: _Attend) -> Tensor:
        """Token ids and positions, both [...], to hidden states [..., hidden] before the final norm."""
        hidden = self.weights.embedding[tokens]
        cos, sin = self._rotary(positions, hidden.dtype)
        for index, layer in enumerate(self.weights.layers):
            queries, kv = self._queries_keys_values(layer, self._norm(hidden, layer.attention_norm), cos, sin)
            hidden = hidden + F.linear(attend(index, queries, kv), layer.attention_out)
            gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    def _queries_keys_values(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self.arch.num_heads, self.arch.num_kv_heads, self.arch.head_dim
        heads = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, head_dim))
        qk, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=-2)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (head_dim,), eps=self.arch.norm_eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin)
        queries, keys = qk.split((num_heads, num_kv_heads), dim=-2)
        return queries, torch.stack((keys, values))

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [..., 1, head_dim] of: rotated = x * cos + (x rolled by half a head) * sin."""
        angles = positions[..., None, None].float() * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.arch.norm_eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, self.weights.final_norm), self.weights.output)


def rotary_inverse_frequencies(arch: Architecture) -> Float[Tensor, " half_head_dim"]:
    """Radians a position turns each pair of a head, with Llama 3.1's scaling where the model has it.

    Wavelengths longer than the original context / low_freq_factor turn `factor` times slower, those shorter than the
    original context / high_freq_factor as before, and between the two the frequency is interpolated.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponents
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled_share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled_share = unscaled_share.clamp(0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)
