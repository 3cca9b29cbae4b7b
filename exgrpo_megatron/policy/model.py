"""Megatron-Core's GPTModel with the shape and weights of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError, padded_vocab_size
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_folder import HFReader, read_config
from exgrpo_conversion.mapping import (
    EMBEDDING,
    OUTPUT_LAYER,
    check_tensor_parallel,
    hf_names,
    manifest,
    pad_vocab,
    shard,
    to_megatron,
)
from exgrpo_megatron.acceleration import choose
from exgrpo_megatron.accelerators import installed
from exgrpo_megatron.config import PolicyConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.layout import VOCAB_MULTIPLE
from exgrpo_megatron.policy.layers import acceleration_options, decoder_spec, fuse_gradients


class ResponseModel(GPTModel):
    """GPTModel that stops before its output layer, and gives hidden states only where a mask asks for them.

    `forward(tokens, None, None, loss_mask=mask)` with a boolean mask [batch, positions] returns on the last pipeline
    stage the normed hidden states [1, chosen positions, hidden], sequence by sequence; on the others what the next
    stage gets. Prompts make up a large part of the positions, and nobody asks what follows inside them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            # Still called, for the hooks that wait until its weight is here; the weight is used by the loss.
            self.output_layer.forward = _unchanged

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """On a last stage, this rank's rows of the output layer: its own weight, or the embedding it shares."""
        own = self.output_layer.weight
        return self.shared_embedding_or_output_weight() if own is None else own

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs["loss_mask"]
        if self.post_process and mask is not None:
            if self.config.sequence_parallel:  # that also sums their gradient over the ranks
                hidden_states = gather_from_sequence_parallel_region(hidden_states)
            sequence, position = mask.nonzero(as_tuple=True)
            rows = position * mask.shape[0] + sequence  # hidden states are [positions, batch, hidden]
            hidden_states = hidden_states.flatten(0, 1).index_select(0, rows).unsqueeze(1)
            kwargs["loss_mask"] = None
        return super()._postprocess(hidden_states, *args, **kwargs)


def _unchanged(hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Stands in for the forward pass of the output layer; it has no bias."""
    return hidden, None


def load_model(folder: Path, policy: PolicyConfig) -> tuple[list[ResponseModel], Architecture]:
    """The model of a Hugging Face folder, on this rank's device, in `policy.precision`.

    One part of it for each chunk of this pipeline stage: one, or as many as the virtual pipeline says.

    Raises:
        CheckpointError: the folder is no supported model, or its tensors are not those its config.json promises.
    """
    try:
        architecture = Architecture.from_hf_config(read_config(folder))
        check_tensor_parallel(architecture, policy.megatron_cfg.tensor_model_parallel_size)
        with HFReader(folder) as reader:
            reader.check(manifest(architecture))  # before any memory is taken for the model
            chunks = build_chunks(architecture, policy)
            _fill(chunks, architecture, reader)
    except (UnsupportedModelError, ModelFolderError) as error:
        raise CheckpointError(f"policy.model_name = {folder}: {error}") from error
    return [chunk.to(_device()) for chunk in chunks], architecture


def build_chunks(architecture: Architecture, policy: PolicyConfig) -> list[ResponseModel]:
    """The chunks of this pipeline stage, with weights at their initial values; `load_model` fills them."""
    config = _transformer_config(architecture, policy)
    chunks = policy.megatron_cfg.virtual_pipeline_model_parallel_size
    numbers: list[int | None] = [None] if chunks is None else list(range(chunks))
    built = [_build_chunk(config, architecture, policy, number) for number in numbers]
    if config.transformer_impl == "transformer_engine" and choose(policy, installed()).gradient_fusion.on:
        for chunk in built:
            fuse_gradients(chunk)
    return built


@torch.no_grad()
def tensors_other_than(
    chunks: Sequence[ResponseModel],
    architecture: Architecture,
    reader: HFReader,
    dtype: torch.dtype | None,
    on_progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """The folder's tensors that do not make the parameters of `chunks`, once both are converted to `dtype`;
    `on_progress` is called a parameter.

    Found by the way a folder is loaded, which shares nothing with the way weights are exported.
    """
    tp_size, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    other: dict[str, None] = {}
    for name, parameter in chain.from_iterable(map(global_parameters, chunks)):
        on_progress()
        names = hf_names(architecture, name)
        parts = [reader.get(part) for part in names]
        made, origin = (
            _own_part(architecture, name, tensors, parameter, tp_size, tp_rank)
            for tensors in (parts, [torch.full_like(part, number) for number, part in enumerate(parts, 1)])
        )  # padded rows of the vocabulary have the number 0, and no meaning
        kept = parameter.detach().cpu().to(dtype or made.dtype)
        wrong = origin[made.to(kept.dtype) != kept]
        other.update(dict.fromkeys(names[int(number) - 1] for number in wrong[wrong > 0].unique()))
    return list(other)


def global_parameters(chunk: ResponseModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk by their name in the whole model, whose layers are counted from the first stage."""
    layers = chunk.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0  # Megatron counts from 1
    for name, parameter in chunk.named_parameters():
        yield _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + first}.", name), parameter


_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _build_chunk(
    config: TransformerConfig, architecture: Architecture, policy: PolicyConfig, number: int | None
) -> ResponseModel:
    scaling = architecture.rope_scaling
    return ResponseModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, number),
        vocab_size=padded_vocab_size(
            architecture.vocab_size, VOCAB_MULTIPLE, policy.megatron_cfg.tensor_model_parallel_size
        ),
        max_sequence_length=policy.max_total_sequence_length,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        vp_stage=number,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling is not None else 1.0,
    )


def _transformer_config(architecture: Architecture, policy: PolicyConfig) -> TransformerConfig:
    layout = policy.megatron_cfg
    dtype = torch.bfloat16 if policy.precision == "bfloat16" else torch.float32
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        qk_layernorm=architecture.qk_norm,
        add_qkv_bias=architecture.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        # Chunks send forwards and backwards at once. In one batch, two stages alone would mix the two up.
        overlap_p2p_comm=layout.chunks > 1,
        batch_p2p_comm=layout.chunks == 1,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        num_layers_in_first_pipeline_stage=layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=layout.num_layers_in_last_pipeline_stage,
        **(_RECOMPUTE if layout.activation_checkpointing else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Without the initialisation Megatron also skips the marks by which it recognises sharded weights, and the
        # gradient norm is then wrong under tensor parallelism.
        perform_initialization=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # no experts here, but variable_seq_lengths insists on it
        # The loss is a sum whose divisors are in its weights already: nothing may be averaged over micro-batches or
        # ranks. Per-token mode leaves gradients summed; the function below leaves out its final division.
        calculate_per_token_loss=True,
        finalize_model_grads_func=sum_gradients,
        **acceleration_options(policy, choose(policy, installed())),
    )


_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Megatron's words for: keep the input of every layer, and compute the rest again."""


def sum_gradients(chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's end of a backward pass (sum over data-parallel ranks, shared weights), without division by tokens."""
    del num_tokens
    _start_sums(chunks)
    finalize_model_grads(chunks, None, **options)


def _start_sums(chunks: list[DistributedDataParallel]) -> None:
    """Start the sums over data-parallel ranks that the backward pass should have started and did not.

    It starts none on a rank without micro-batches, nor in the first pass of a rank, in which Megatron learns which
    gradients there are; other ranks may have started all. So the order must be theirs: the last chunk first.
    """
    for chunk in reversed(chunks):
        if not chunk.ddp_config.overlap_grad_reduce:
            return
        for group in chunk.bucket_groups:
            if group.grad_reduce_handle is None and not getattr(group, "grad_reduce_finished", False):
                group.start_grad_sync()


@torch.no_grad()
def _fill(chunks: list[ResponseModel], architecture: Architecture, reader: HFReader) -> None:
    tp_size, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for name, parameter in chain.from_iterable(map(global_parameters, chunks)):
        parts = [reader.get(part) for part in hf_names(architecture, name)]
        parameter.copy_(_own_part(architecture, name, parts, parameter, tp_size, tp_rank))


def _own_part(
    architecture: Architecture, name: str, parts: Sequence[Tensor], parameter: Tensor, tp_size: int, tp_rank: int
) -> Tensor:
    """What `parts`, whole Hugging Face tensors, are of this rank's parameter."""
    full = to_megatron(architecture, name, parts)
    if name in (EMBEDDING, OUTPUT_LAYER):
        full = pad_vocab(full, parameter.shape[0] * tp_size)
    return shard(name, full, tp_size, tp_rank)
