"""Names and layouts of the weights of a dense decoder: Hugging Face on one side, Megatron-Core on the other.

Megatron names here are global: the layer number counts from the first pipeline stage, tensors are whole unless a
function says shard. Two layouts differ between the sides. Megatron's `linear_qkv` stacks, for each key-value group,
the rows of its query heads, then of its key, then of its value; `linear_fc1` stacks gate over up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.families import FAMILIES
from exgrpo_conversion.families.family import EMBEDDING, FINAL_NORM, OUTPUT_LAYER, QK_NORM

# A weight matrix, bias or norm of any floating dtype.
Weight: TypeAlias = Float[Tensor, "..."]

__all__ = [
    "EMBEDDING", "OUTPUT_LAYER", "Weight", "check_tensor_parallel", "hf_names", "is_sharded", "manifest",
    "megatron_names", "megatron_pieces", "pad_vocab", "shard", "to_hf", "to_megatron", "unshard",
]  # fmt: skip


def megatron_names(arch: Architecture) -> list[str]:
    """Every parameter of the whole Megatron model, by its local-spec name, first layer to last."""
    layers = [
        f"decoder.layers.{layer}.{suffix}" for layer in range(arch.num_layers) for suffix in FAMILIES[arch.family].layer
    ]
    head = [] if arch.tied else [OUTPUT_LAYER]
    return [EMBEDDING, *layers, FINAL_NORM, *head]


def hf_names(arch: Architecture, megatron_name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that make up one Megatron parameter, in the order `to_megatron` takes them.

    The norm names of both layer specs (local, Transformer Engine) are understood. The output layer of a tied model,
    which Megatron repeats on its last pipeline stage, is made of the embedding.

    Raises:
        UnsupportedModelError: the model has no such parameter.
    """
    return tuple(_parts(arch, megatron_name))


def to_megatron(arch: Architecture, megatron_name: str, tensors: Sequence[Weight]) -> Weight:
    """Build one whole Megatron parameter from its Hugging Face tensors (see `hf_names`).

    The result may share memory with the input. Vocabulary rows are not padded (see `pad_vocab`).

    Raises:
        ValueError: a wrong number of tensors, or a tensor of another shape than the architecture says.
    """
    pieces = megatron_pieces(arch, megatron_name, tensors)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def megatron_pieces(arch: Architecture, megatron_name: str, tensors: Sequence[Weight]) -> list[Weight]:
    """Parts of the input whose rows, one part after another, are the parameter that `to_megatron` makes.

    Raises:
        ValueError: as `to_megatron`.
    """
    parts = _parts(arch, megatron_name)
    if len(tensors) != len(parts):
        raise ValueError(f"{megatron_name} is made of {len(parts)} tensors ({', '.join(parts)}), got {len(tensors)}")
    for (name, shape), tensor in zip(parts.items(), tensors, strict=True):
        _check_shape(name, shape, tensor)
    if _is_fused_qkv(megatron_name):
        groups = zip(*(_by_group(arch, tensor) for tensor in tensors), strict=True)
        return [piece for group in groups for piece in group]
    return list(tensors)


def to_hf(arch: Architecture, megatron_name: str, tensor: Weight) -> list[tuple[str, Weight]]:
    """Split one whole Megatron parameter into named Hugging Face tensors; padded vocabulary rows are dropped.

    The results are contiguous and may share memory with the input. A tied model's output layer gives an empty list:
    its embedding is already exported under its own name.

    Raises:
        ValueError: the parameter is not whole, or has another shape than the architecture says.
    """
    parts = _parts(arch, megatron_name)
    if megatron_name == OUTPUT_LAYER and arch.tied:
        return []
    if _is_fused_qkv(megatron_name):
        pieces = _split_qkv(arch, megatron_name, tensor)
    elif megatron_name in (EMBEDDING, OUTPUT_LAYER):
        pieces = [tensor[: arch.vocab_size]]
    else:
        pieces = list(tensor.chunk(len(parts)))
    for (name, shape), piece in zip(parts.items(), pieces, strict=True):
        _check_shape(f"{name} (from {megatron_name})", shape, piece)
    return list(zip(parts, pieces, strict=True))


def manifest(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face model with its shape, embedding first."""
    return {name: shape for megatron in megatron_names(arch) for name, shape in _parts(arch, megatron).items()}


def shard(megatron_name: str, full: Weight, tp_size: int, tp_rank: int) -> Weight:
    """The part of a whole Megatron parameter that tensor-parallel rank `tp_rank` holds (contiguous, may be a view).

    `tp_size` must divide the number of key-value heads (`check_tensor_parallel`): the fused QKV is cut by group.

    Raises:
        ValueError: `tp_size` does not divide the sharded dimension.
    """
    dim = _sharded_dim(megatron_name)
    if dim is None or tp_size == 1:
        return full
    blocks = full.chunk(2) if _is_gated(megatron_name) else (full,)
    size = blocks[0].shape[dim]
    if size % tp_size:
        raise ValueError(
            f"{megatron_name}: {tp_size} tensor-parallel ranks do not divide dimension {dim} of size {size}"
        )
    return torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in blocks]).contiguous()


def is_sharded(megatron_name: str) -> bool:
    """Whether tensor-parallel ranks share the parameter, rather than that each has it whole."""
    return _sharded_dim(megatron_name) is not None


def unshard(megatron_name: str, parts: Sequence[Weight]) -> Weight:
    """The whole Megatron parameter from the parts of all tensor-parallel ranks, in rank order."""
    dim = _sharded_dim(megatron_name)
    if dim is None or len(parts) == 1:
        return parts[0]
    if _is_gated(megatron_name):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(list(parts), dim)


def check_tensor_parallel(arch: Architecture, tp_size: int) -> None:
    """Refuse a tensor-parallel size that would cut through a head, a key-value group or the MLP.

    Raises:
        UnsupportedModelError: `tp_size` does not divide the key-value heads or the MLP size.
    """
    for key, size in (("num_key_value_heads", arch.num_kv_heads), ("intermediate_size", arch.ffn_size)):
        if size % tp_size:
            raise UnsupportedModelError(key, size, f"a multiple of the tensor-parallel size {tp_size}")


def pad_vocab(weight: Float[Tensor, "vocab hidden"], rows: int) -> Float[Tensor, "rows hidden"]:
    """`weight` with zero rows appended up to `rows`."""
    vocab, hidden = weight.shape
    if rows < vocab:
        raise ValueError(f"cannot pad {vocab} vocabulary rows to {rows}")
    return weight if rows == vocab else torch.cat([weight, weight.new_zeros(rows - vocab, hidden)])


# Transformer Engine fuses a norm into the linear layer behind it and names it there.
LOCAL_SPEC_NAME = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

_SHARDED_DIM = {
    EMBEDDING: 0,
    OUTPUT_LAYER: 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
}
_REPLICATED = {
    FINAL_NORM,
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    *QK_NORM,
}

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def _parts(arch: Architecture, megatron_name: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of the tensors of one Megatron parameter."""
    layer, suffix = _parse(megatron_name)
    family = FAMILIES[arch.family]
    table = family.top if layer is None else family.layer
    if suffix not in table or (layer is not None and layer >= arch.num_layers):
        raise UnsupportedModelError(
            "Megatron parameter", megatron_name, f"parameters of a {arch.family} model with {arch.num_layers} layers"
        )
    if suffix == OUTPUT_LAYER and arch.tied:
        suffix = EMBEDDING
    prefix = "" if layer is None else f"model.layers.{layer}."
    sizes = _sizes(arch)
    return {prefix + name: tuple(sizes[dim] for dim in dims) for name, dims in table[suffix].items()}


def _parse(megatron_name: str) -> tuple[int | None, str]:
    """(layer number or None, local-spec name within the layer or the model)."""
    match = _LAYER_NAME.fullmatch(megatron_name)
    if not match:
        return None, megatron_name
    return int(match[1]), LOCAL_SPEC_NAME.get(match[2], match[2])


def _sizes(arch: Architecture) -> dict[str, int]:
    return {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "queries": arch.num_heads * arch.head_dim,
        "keys": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "ffn": arch.ffn_size,
    }


def _check_shape(name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the architecture asks for {shape}")


def _is_fused_qkv(megatron_name: str) -> bool:
    return _parse(megatron_name)[1].startswith("self_attention.linear_qkv.")


def _is_gated(megatron_name: str) -> bool:
    return _parse(megatron_name)[1] == "mlp.linear_fc1.weight"


def _sharded_dim(megatron_name: str) -> int | None:
    """The dimension cut by tensor parallelism, or None for a parameter that every rank holds whole."""
    _, suffix = _parse(megatron_name)
    if suffix not in _SHARDED_DIM and suffix not in _REPLICATED:
        raise UnsupportedModelError("Megatron parameter", megatron_name, "parameters of a dense decoder")
    return _SHARDED_DIM.get(suffix)


def _by_group(arch: Architecture, projection: Tensor) -> Tensor:
    """[rows, ...] -> [key-value groups, rows per group, ...]."""
    return projection.unflatten(0, (arch.num_kv_heads, -1))


def _split_qkv(arch: Architecture, megatron_name: str, fused: Tensor) -> list[Tensor]:
    queries_per_group = arch.num_heads // arch.num_kv_heads
    rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    _check_shape(megatron_name, (rows, *fused.shape[1:]), fused)
    heads = [queries_per_group * arch.head_dim, arch.head_dim, arch.head_dim]
    return [piece.flatten(0, 1).contiguous() for piece in _by_group(arch, fused).split(heads, dim=1)]
