"""The parameters of a pipeline stage on one tensor-parallel rank, in the order in which Megatron-Core has them."""

from __future__ import annotations

from dataclasses import dataclass

from exgrpo_conversion.architecture import Architecture, padded_vocab_size
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.layout import VOCAB_MULTIPLE, stage_layers


@dataclass(frozen=True)
class Parameter:
    """A tensor of one rank."""

    name: str
    elements: int
    shared_embedding: bool = False
    """An embedding that the first and the last stage both hold, tied to each other."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage."""

    index: int
    num_layers: int
    is_last: bool
    chunks: tuple[tuple[Parameter, ...], ...]
    """Its parts of the model, one without virtual stages."""

    @property
    def elements(self) -> int:
        """Numbers in the weights of one rank."""
        return sum(parameter.elements for chunk in self.chunks for parameter in chunk)


def model_elements(arch: Architecture) -> int:
    """Parameters of the whole model, as its Hugging Face folder has them: no padded rows, a tied embedding once."""
    layer = sum(elements for _, elements in _layer(arch, 1))
    vocabulary = arch.vocab_size * arch.hidden_size
    return arch.num_layers * layer + arch.hidden_size + vocabulary * (1 if arch.tied else 2)


def stages(arch: Architecture, layout: MegatronConfig, chunks: int = 1) -> list[Stage]:
    """Every pipeline stage, of so many chunks; raises ConfigError where the layers cannot be shared out."""
    sizes = stage_layers(arch.num_layers, layout)
    return [
        Stage(
            index,
            size,
            is_last=index == len(sizes) - 1,
            chunks=tuple(
                _chunk(
                    arch,
                    layout.tensor_model_parallel_size,
                    size // chunks,
                    first=index == chunk == 0,
                    last=(index, chunk) == (len(sizes) - 1, chunks - 1),
                )
                for chunk in range(chunks)
            ),
        )
        for index, size in enumerate(sizes)
    ]


def _chunk(
    arch: Architecture, tensor_parallel: int, num_layers: int, *, first: bool, last: bool
) -> tuple[Parameter, ...]:
    rows = padded_vocab_size(arch.vocab_size, VOCAB_MULTIPLE, tensor_parallel) // tensor_parallel
    vocabulary, shared = rows * arch.hidden_size, arch.tied and not (first and last)
    layers = [
        Parameter(f"decoder.layers.{layer}.{name}", elements)
        for layer in range(num_layers)
        for name, elements in _layer(arch, tensor_parallel)
    ]
    embedding = [Parameter("embedding.word_embeddings.weight", vocabulary, shared)] if first else []
    norm = [Parameter("decoder.final_layernorm.weight", arch.hidden_size)] if last else []
    output = [Parameter("output_layer.weight", vocabulary, shared)] if last and not (arch.tied and first) else []
    return (*embedding, *layers, *norm, *output)


def _layer(arch: Architecture, tensor_parallel: int) -> list[tuple[str, int]]:
    hidden, head = arch.hidden_size, arch.head_dim
    queries = arch.num_heads * head // tensor_parallel
    fused = queries + 2 * arch.num_kv_heads * head // tensor_parallel
    ffn = arch.ffn_size // tensor_parallel
    bias = [("self_attention.linear_qkv.bias", fused)] if arch.qkv_bias else []
    head_norms = [("self_attention.q_layernorm.weight", head), ("self_attention.k_layernorm.weight", head)]
    return [
        ("input_layernorm.weight", hidden),
        ("self_attention.linear_proj.weight", hidden * queries),
        ("self_attention.linear_qkv.weight", fused * hidden),
        *bias,
        *(head_norms if arch.qk_norm else []),
        ("pre_mlp_layernorm.weight", hidden),
        ("mlp.linear_fc1.weight", 2 * ffn * hidden),
        ("mlp.linear_fc2.weight", hidden * ffn),
    ]
