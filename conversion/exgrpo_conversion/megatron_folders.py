"""Megatron's folders around the weights: what is written for Megatron-LM and for NeMo 2."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exgrpo_conversion._shards import sync
from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.aside import swap_in, temporary_sibling
from exgrpo_conversion.contexts import HF_FOLDER
from exgrpo_conversion.hf_folder import copy_side_files, write_config
from exgrpo_conversion.mapping import EMBEDDING, OUTPUT_LAYER, hf_names, megatron_names, megatron_pieces
from exgrpo_conversion.source import Source
from exgrpo_conversion.torch_dist import TRACKER_FILE
from exgrpo_conversion.torch_dist_writer import TorchDistWriter

RELEASE = "release"
"""Megatron-LM's name for weights without a training run."""


@dataclass(frozen=True)
class MegatronTarget:
    """What is to be written, and how."""

    folder: Path
    dtype: torch.dtype
    rows: int
    """Of the padded vocabulary."""
    vocab_divisible_by: int
    tensor_parallel: int
    max_file_bytes: int
    replace: bool
    """Whether an earlier conversion that is there in the end may be replaced."""
    progress: Callable[[int], object]
    """Called with the bytes of the source's tensors that are done."""


def write_torch_dist(source: Source, target: MegatronTarget) -> None:
    """<folder>/release and the tracker file, as Megatron-LM has them, and the config beside them."""
    common = {
        "args": _arguments(source.arch, target),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    with temporary_sibling(target.folder) as aside:
        (aside / RELEASE).mkdir()
        _write_weights(source, aside / RELEASE, target, "", common)
        _write_config(source, aside / HF_FOLDER, target.dtype)
        (aside / TRACKER_FILE).write_text(RELEASE, encoding="utf-8")
        _publish(aside, target)


def write_nemo(source: Source, target: MegatronTarget) -> None:
    """<folder>/weights, whose keys have NeMo's prefix, and <folder>/context with the config."""
    with temporary_sibling(target.folder) as aside:
        (aside / "weights").mkdir()
        (aside / "context").mkdir()
        _write_weights(source, aside / "weights", target, "module.", {})
        _write_config(source, aside / "context" / HF_FOLDER, target.dtype)
        _publish(aside, target)


def _write_weights(source: Source, folder: Path, target: MegatronTarget, prefix: str, common: dict[str, Any]) -> None:
    writer = TorchDistWriter(folder, source.arch, target.max_file_bytes, prefix)
    try:
        for name in megatron_names(source.arch):
            parts = [source.read(part) for part in hf_names(source.arch, name)]
            pieces = megatron_pieces(source.arch, name, [part.to(target.dtype) for part in parts])
            if name in (EMBEDDING, OUTPUT_LAYER):
                pieces.append(pieces[0].new_zeros(target.rows - source.arch.vocab_size, source.arch.hidden_size))
            writer.add(name, pieces)
            target.progress(sum(part.nbytes for part in parts))
        writer.finish(common)
    finally:
        writer.close()


def _write_config(source: Source, folder: Path, dtype: torch.dtype) -> None:
    folder.mkdir()
    copy_side_files(source.config_folder, folder)
    write_config(folder, source.config, dtype)


def _publish(aside: Path, target: MegatronTarget) -> None:
    for path in (*aside.rglob("*"), aside):
        sync(path)
    swap_in(aside, target.folder, replace=target.replace)


def _arguments(arch: Architecture, target: MegatronTarget) -> Namespace:
    """The arguments of Megatron-LM that it compares with its own, or takes over with --use-checkpoint-args."""
    return Namespace(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        group_query_attention=arch.num_kv_heads != arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        seq_length=arch.max_positions,
        max_position_embeddings=arch.max_positions,
        position_embedding_type="rope",
        add_position_embedding=False,
        use_rotary_position_embeddings=True,
        rotary_base=int(arch.rope_theta) if arch.rope_theta.is_integer() else arch.rope_theta,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=arch.rope_scaling is not None,
        rope_scaling_factor=arch.rope_scaling.factor if arch.rope_scaling is not None else 1.0,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=arch.norm_eps,
        apply_layernorm_1p=False,
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=not arch.tied,
        padded_vocab_size=target.rows,
        make_vocab_size_divisible_by=target.vocab_divisible_by,
        tensor_model_parallel_size=target.tensor_parallel,
        pipeline_model_parallel_size=1,
        params_dtype=target.dtype,
        bf16=target.dtype == torch.bfloat16,
        fp16=target.dtype == torch.float16,
        ckpt_format="torch_dist",
    )
