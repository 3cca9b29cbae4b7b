"""Layouts against hand calculations, names and shapes against transformers, inverses bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hf_models import FAMILIES, tensors_of, tiny_model

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError, padded_vocab_size
from exgrpo_conversion.mapping import (
    check_tensor_parallel,
    hf_names,
    manifest,
    megatron_names,
    pad_vocab,
    shard,
    to_hf,
    to_megatron,
    unshard,
)

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
QKV_BIAS = "decoder.layers.0.self_attention.linear_qkv.bias"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"

# 4 query heads in 2 groups, heads of 2 rows: queries 8 rows, keys and values 4 each, fused 16.
HAND = Architecture(
    family="qwen2",
    num_layers=1,
    hidden_size=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    ffn_size=6,
    vocab_size=5,
    tied=False,
    qkv_bias=True,
    qk_norm=False,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=16,
)
# Row labels: query rows 0-7 (head h has 2h, 2h+1), key rows 10-13, value rows 20-23.
QUERIES, KEYS, VALUES = torch.arange(0.0, 8), torch.arange(10.0, 14), torch.arange(20.0, 24)
# By hand: group 0 holds heads 0 and 1, its key, its value; then group 1.
FUSED = [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


def rows(labels: torch.Tensor) -> torch.Tensor:
    """[rows, 3]: row labelled r is (r, r + .1, r + .2)."""
    return labels[:, None] + torch.tensor([0.0, 0.1, 0.2])


def test_fused_qkv_rows_follow_their_key_value_group():
    fused = to_megatron(HAND, QKV, [rows(QUERIES), rows(KEYS), rows(VALUES)])
    assert torch.equal(fused, rows(torch.tensor(FUSED, dtype=torch.float32)))


def test_fused_qkv_bias_has_the_order_of_the_rows():
    assert to_megatron(HAND, QKV_BIAS, [QUERIES, KEYS, VALUES]).tolist() == FUSED


def test_a_tensor_parallel_rank_gets_whole_key_value_groups():
    fused = torch.tensor(FUSED, dtype=torch.float32)
    assert shard(QKV_BIAS, fused, 2, 0).tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert shard(QKV_BIAS, fused, 2, 1).tolist() == [4, 5, 6, 7, 12, 13, 22, 23]


def test_gate_stands_over_up_on_every_tensor_parallel_rank():
    gate, up = rows(torch.arange(0.0, 6)), rows(torch.arange(100.0, 106))
    fused = to_megatron(HAND, FC1, [gate, up])
    assert fused[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]
    assert shard(FC1, fused, 2, 0)[:, 0].tolist() == [0, 1, 2, 100, 101, 102]
    assert shard(FC1, fused, 2, 1)[:, 0].tolist() == [3, 4, 5, 103, 104, 105]


def test_row_parallel_weights_are_cut_by_columns():
    weight = torch.arange(24.0).reshape(3, 8)  # [hidden, query rows]; rank 1 has the columns of heads 2 and 3
    second = shard(PROJ, weight, 2, 1)
    assert second.tolist() == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]]
    assert second.is_contiguous()


def test_norms_are_whole_on_every_rank():
    norm = torch.arange(3.0)
    for name in ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"):
        assert torch.equal(shard(name, norm, 2, 1), norm)
        assert torch.equal(unshard(name, [norm, norm]), norm)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_is_the_state_dict_of_the_transformers_model(family: str, tied: bool):
    model = tiny_model(family, tied)
    arch = Architecture.from_hf_config(model.config.to_dict())
    assert manifest(arch) == {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_tensor_survives_the_way_to_megatron_shards_and_back(family: str, tied: bool, tp_size: int):
    model = tiny_model(family, tied)
    arch, tensors = Architecture.from_hf_config(model.config.to_dict()), tensors_of(model)
    rows_allocated = padded_vocab_size(arch.vocab_size, 8, tp_size)
    back: dict[str, torch.Tensor] = {}
    for name in megatron_names(arch):
        full = to_megatron(arch, name, [tensors[part] for part in hf_names(arch, name)])
        if full.shape[0] == arch.vocab_size:
            full = pad_vocab(full, rows_allocated)
        parts = [shard(name, full, tp_size, rank) for rank in range(tp_size)]
        back.update(to_hf(arch, name, unshard(name, parts)))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_names_of_the_transformer_engine_spec_mean_the_same_tensors():
    fused_norm = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert hf_names(HAND, fused_norm) == ("model.layers.0.input_layernorm.weight",)
    assert hf_names(HAND, fused_norm) == hf_names(HAND, "decoder.layers.0.input_layernorm.weight")
    fused_norm = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert hf_names(HAND, fused_norm) == ("model.layers.0.post_attention_layernorm.weight",)
    assert hf_names(HAND, fused_norm) == hf_names(HAND, "decoder.layers.0.pre_mlp_layernorm.weight")


def test_a_tied_output_layer_is_loaded_from_the_embedding_and_not_exported():
    tied = dataclasses.replace(HAND, tied=True)
    assert hf_names(tied, "output_layer.weight") == ("model.embed_tokens.weight",)
    assert to_hf(tied, "output_layer.weight", torch.zeros(5, 3)) == []
    assert "output_layer.weight" not in megatron_names(tied)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.1.input_layernorm.weight",  # HAND has layer 0 only
        "decoder.layers.0.self_attention.q_layernorm.weight",  # of qwen3
        "decoder.layers.0.mlp.router.weight",
        "module.output_layer.weight",
        "decoder.layers.0.self_attention.linear_qkv._extra_state",
    ],
)
def test_an_unknown_parameter_is_refused_by_name(name: str):
    with pytest.raises(UnsupportedModelError, match=name.replace(".", r"\.")):
        hf_names(HAND, name)


def test_sharding_an_unknown_parameter_is_refused():
    with pytest.raises(UnsupportedModelError, match="router"):
        shard("decoder.layers.0.mlp.router.weight", torch.zeros(4, 4), 2, 0)


def test_a_transposed_tensor_is_refused():
    with pytest.raises(ValueError, match=r"down_proj\.weight has shape \(6, 3\).* \(3, 6\)"):
        to_megatron(HAND, "decoder.layers.0.mlp.linear_fc2.weight", [torch.zeros(6, 3)])


def test_a_shard_is_not_taken_for_a_whole_parameter():
    with pytest.raises(ValueError, match=r"linear_qkv\.weight has shape \(8, 3\).* \(16, 3\)"):
        to_hf(HAND, QKV, torch.zeros(8, 3))


def test_a_missing_part_of_a_fused_parameter_is_refused():
    with pytest.raises(ValueError, match=r"made of 3 tensors .* got 2"):
        to_megatron(HAND, QKV, [rows(QUERIES), rows(KEYS)])


def test_tensor_parallel_sizes_that_cut_a_group_or_the_mlp_are_refused():
    check_tensor_parallel(HAND, 2)
    with pytest.raises(UnsupportedModelError, match=r"num_key_value_heads = 2 .* tensor-parallel size 4"):
        check_tensor_parallel(HAND, 4)
    with pytest.raises(UnsupportedModelError, match=r"intermediate_size = 5 .* tensor-parallel size 2"):
        check_tensor_parallel(dataclasses.replace(HAND, ffn_size=5), 2)


def test_an_uneven_shard_is_refused():
    with pytest.raises(ValueError, match="3 tensor-parallel ranks do not divide dimension 1 of size 8"):
        shard(PROJ, torch.zeros(3, 8), 3, 0)


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "tp_size", "rows_allocated"),
    [(101, 128, 1, 128), (101, 128, 2, 256), (256, 128, 2, 256), (257, 128, 2, 512), (151936, 128, 4, 152064)],
)
def test_the_vocabulary_is_rounded_up(vocab: int, divisible_by: int, tp_size: int, rows_allocated: int):
    # 151936 / 512 = 296.75, so 297 * 512 = 152064.
    assert padded_vocab_size(vocab, divisible_by, tp_size) == rows_allocated


def test_padding_adds_zero_rows_and_never_cuts():
    padded = pad_vocab(torch.ones(2, 3), 4)
    assert padded.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="cannot pad 2 vocabulary rows to 1"):
        pad_vocab(torch.ones(2, 3), 1)
