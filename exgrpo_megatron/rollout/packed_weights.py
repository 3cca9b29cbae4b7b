"""The weights of the embedded engine: fused per layer, copied from a stream of HF tensors and checked whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import manifest


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are [out features, in features]; heads stand as query, key, value heads."""

    attention_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(query + 2 key-value heads) * head_dim, hidden]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[query + key heads, head_dim]: the query norm repeated for each query head, then the key norm."""
    attention_out: Tensor
    """[hidden, query heads * head_dim]"""
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Tensor
    """[2 * ffn, hidden]: gate, then up"""
    down: Tensor
    """[hidden, ffn]"""


@dataclass(frozen=True)
class PackedWeights:
    """A whole model. `output` is `embedding` itself when they are tied."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[hidden]"""
    output: Tensor
    """[vocab, hidden]"""


@torch.inference_mode()
def pack_weights(
    arch: Architecture, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, device: torch.device
) -> PackedWeights:
    """Copy a stream of HF-named tensors into a new `PackedWeights`.

    A tensor may be reused by its owner as soon as the next is asked for. The stream is read to its end even when a
    tensor is wrong, because its producer may be a collective operation.

    Raises:
        ValueError: tensors are missing, unknown, misshapen or given twice; all of them are listed.
    """
    packed = _allocate(arch, dtype, device)
    destinations = _destinations(arch, packed)
    shapes = {name: tuple(shape) for name, shape in manifest(arch).items()}
    assert destinations.keys() == shapes.keys(), "the packed form and the manifest name different tensors"
    problems = _copy_all(weights, destinations, shapes)
    if problems:
        raise ValueError(_refusal(problems))
    return packed


def _copy_all(
    weights: Iterable[tuple[str, Tensor]], destinations: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Copy what is right; return a line for every tensor that is not."""
    problems: list[str] = []
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in shapes:
            problems.append(f"unknown: {name}")
        elif name in seen:
            problems.append(f"given twice: {name}")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"misshapen: {name} is {list(tensor.shape)}, not {list(shapes[name])}")
        else:
            destinations[name].copy_(tensor)
        seen.add(name)
    return problems + [f"missing: {name}" for name in shapes if name not in seen]


def _refusal(problems: list[str]) -> str:
    listed = "\n  ".join(problems)
    return f"the weights do not fit the model ({len(problems)} tensors); those loaded before stay in force:\n  {listed}"


def _allocate(arch: Architecture, dtype: torch.dtype, device: torch.device) -> PackedWeights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, ffn, head_dim = arch.hidden_size, arch.ffn_size, arch.head_dim
    qk_heads = arch.num_heads + arch.num_kv_heads
    qkv_width = (qk_heads + arch.num_kv_heads) * head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=empty(hidden),
            qkv=empty(qkv_width, hidden),
            qkv_bias=empty(qkv_width) if arch.qkv_bias else None,
            qk_norm=empty(qk_heads, head_dim) if arch.qk_norm else None,
            attention_out=empty(hidden, arch.num_heads * head_dim),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * ffn, hidden),
            down=empty(hidden, ffn),
        )
        for _ in range(arch.num_layers)
    )
    embedding = empty(arch.vocab_size, hidden)
    output = embedding if arch.tied else empty(arch.vocab_size, hidden)
    return PackedWeights(embedding, layers, empty(hidden), output)


def _destinations(arch: Architecture, packed: PackedWeights) -> dict[str, Tensor]:
    """The part of `packed` that each HF tensor is copied (or broadcast) into."""
    parts = {"model.embed_tokens.weight": packed.embedding, "model.norm.weight": packed.final_norm}
    if not arch.tied:
        parts["lm_head.weight"] = packed.output
    for index, layer in enumerate(packed.layers):
        parts.update({f"model.layers.{index}.{name}": part for name, part in _layer_destinations(arch, layer).items()})
    return parts


def _layer_destinations(arch: Architecture, layer: LayerWeights) -> dict[str, Tensor]:
    head_counts = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
    widths = [heads * arch.head_dim for heads in head_counts]
    gate, up = layer.gate_up.split(arch.ffn_size)
    parts = {
        "input_layernorm.weight": layer.attention_norm,
        "self_attn.o_proj.weight": layer.attention_out,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down,
    }
    for letter, part in zip("qkv", layer.qkv.split(widths), strict=True):
        parts[f"self_attn.{letter}_proj.weight"] = part
    if layer.qkv_bias is not None:
        for letter, part in zip("qkv", layer.qkv_bias.split(widths), strict=True):
            parts[f"self_attn.{letter}_proj.bias"] = part
    if layer.qk_norm is not None:
        for letter, part in zip("qk", layer.qk_norm.split(head_counts[:2]), strict=True):
            parts[f"self_attn.{letter}_norm.weight"] = part
    return parts
