"""Which layers and heads a rank gets: the rules that a model sets for a parallel layout."""

from __future__ import annotations

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.errors import ConfigError

VOCAB_MULTIPLE = 128
"""Vocabulary rows are padded to a multiple of this on every tensor-parallel rank."""


def check_layout(architecture: Architecture, layout: MegatronConfig) -> None:
    """Raise ConfigError where the model's heads, MLP or layers cannot be shared out as `policy.megatron_cfg` says."""
    tensor_parallel = layout.tensor_model_parallel_size
    for name, size in (
        ("num_attention_heads", architecture.num_heads),
        ("num_key_value_heads", architecture.num_kv_heads),
        ("intermediate_size", architecture.ffn_size),
    ):
        if size % tensor_parallel:
            raise ConfigError(
                f"policy.megatron_cfg.tensor_model_parallel_size = {tensor_parallel} does not divide the model's "
                f"{name} = {size}"
            )
    stage_layers(architecture.num_layers, layout)
    _check_fp8_widths(architecture, layout)


def check_positions(architecture: Architecture, longest: int) -> None:
    """Raise ConfigError where the model has no positions for sequences of `longest` tokens."""
    if longest > architecture.max_positions:
        raise ConfigError(
            f"policy.max_total_sequence_length = {longest} is more than the {architecture.max_positions} positions "
            f"of the model (max_position_embeddings): lower it, or use a model with more"
        )


def check_engine_layout(
    architecture: Architecture, layout: MegatronConfig, ranks: int, world_size: int, data_parallel_size: int
) -> None:
    """Raise ConfigError where `ranks` ranks cannot share a vLLM engine: they follow one another, and must all belong to
    one data-parallel rank."""
    name = f"policy.generation.vllm_cfg.tensor_parallel_size = {ranks}"
    for key, size in (
        ("num_attention_heads", architecture.num_heads),
        ("num_key_value_heads", architecture.num_kv_heads),
        ("intermediate_size", architecture.ffn_size),
    ):
        if size % ranks:
            raise ConfigError(f"{name} does not divide the model's {key} = {size}")
    alone = data_parallel_size == 1 and world_size % ranks == 0
    if not alone and layout.tensor_model_parallel_size % ranks:
        raise ConfigError(
            f"{name} must divide policy.megatron_cfg.tensor_model_parallel_size = "
            f"{layout.tensor_model_parallel_size}, or, where there is one data-parallel rank (here "
            f"{data_parallel_size}), the {world_size} processes"
        )


def _check_fp8_widths(architecture: Architecture, layout: MegatronConfig) -> None:
    """Raise ConfigError where a weight's share on one rank has a side that FP8 products do not take."""
    if not layout.fp8_cfg.enabled:
        return
    ranks, multiple = layout.tensor_model_parallel_size, layout.fp8_cfg.width_multiple
    heads, groups = architecture.num_heads, architecture.num_kv_heads
    for name, size in (
        ("hidden_size", architecture.hidden_size),
        ("intermediate_size", architecture.ffn_size // ranks),
        ("num_attention_heads * head_dim", heads * architecture.head_dim // ranks),
        (
            "(num_attention_heads + 2 * num_key_value_heads) * head_dim",
            (heads + 2 * groups) * architecture.head_dim // ranks,
        ),
    ):
        if size % multiple:
            raise ConfigError(
                f"policy.megatron_cfg.fp8_cfg.fp8_recipe = {layout.fp8_cfg.fp8_recipe} takes weights whose sides are "
                f"multiples of {multiple} on every rank, but the model's {name} is {size} there "
                f"(tensor_model_parallel_size = {ranks})"
            )


def stage_layers(num_layers: int, layout: MegatronConfig) -> list[int]:
    """Number of layers of each pipeline stage.

    Raises:
        ConfigError: the layers cannot be shared out among the stages.
    """
    stages = layout.pipeline_model_parallel_size
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    given = [size for size in (first, last) if size is not None]
    layers_left, stages_left = num_layers - sum(given), stages - len(given)
    fits = layers_left >= stages_left and layers_left % stages_left == 0 if stages_left else layers_left == 0
    if not fits:
        set_apart = (
            f", of which num_layers_in_first_pipeline_stage = {first} and num_layers_in_last_pipeline_stage = {last} "
            f"leave {layers_left} for the other {stages_left}"
            if given
            else ""
        )
        raise ConfigError(
            f"policy.megatron_cfg.pipeline_model_parallel_size = {stages} does not divide the model's {num_layers} "
            f"layers{set_apart}: every stage that is not set apart has the same number, at least 1"
        )
    even = layers_left // stages_left if stages_left else 0
    sizes = [
        *([first] if first is not None else []),
        *[even] * stages_left,
        *([last] if last is not None else []),
    ]
    for stage, size in enumerate(sizes):
        if size % layout.chunks:
            raise ConfigError(
                f"policy.megatron_cfg.virtual_pipeline_model_parallel_size = {layout.chunks} does not divide the "
                f"{size} layers of pipeline stage {stage} (of {num_layers} layers on {stages} stages): every chunk of "
                "a stage has the same number, at least 1"
            )
    return sizes
