"""Weights cut into buckets: what arrives is what was sent, in pieces that fit, and nothing wrong is sent."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, hf_weights, random_model

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.rollout.weight_buckets import BucketPlan, check_manifest, group_of, in_groups, send, view
from exgrpo_megatron.rollout.weight_buffers import SharedFileBuffer, make_buffer, open_buffer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIGS["qwen2 tied, biases"]())


@pytest.fixture(scope="module")
def arch(model):
    return Architecture.from_hf_config(model.config.to_dict())


def in_order(arch, model):
    weights = hf_weights(model)
    return [(name, weights[name]) for name in in_groups(manifest(arch))]


def sent(plan, weights, *, separate_process=False):
    """What the other side reads, piece by piece, each with its names."""
    buffer = make_buffer(plan.capacity, CPU, separate_process=separate_process)
    received, pieces = {}, []

    def deliver(piece):
        opened = open_buffer(buffer.handle())
        pieces.append([placed.name for placed in piece])
        received.update({placed.name: view(opened, placed, plan.dtype).clone() for placed in piece})

    try:
        send(weights, plan, buffer, deliver)
    finally:
        buffer.close()
    return received, pieces


@pytest.mark.parametrize("separate_process", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 10**8])
def test_every_weight_arrives_whole_whatever_the_size_of_a_bucket(model, arch, bucket_bytes, separate_process):
    plan = BucketPlan(manifest(arch), torch.float32, bucket_bytes)
    received, pieces = sent(plan, in_order(arch, model), separate_process=separate_process)
    assert received.keys() == manifest(arch).keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in hf_weights(model).items())
    assert all(sum(map(plan.num_bytes, piece)) <= plan.capacity for piece in pieces)
    assert (len(pieces) == 1) == (bucket_bytes == 10**8)


def test_weights_are_cast_on_the_way(model, arch):
    received, _ = sent(BucketPlan(manifest(arch), torch.bfloat16, 1), in_order(arch, model))
    weight = hf_weights(model)["model.norm.weight"]
    assert torch.equal(received["model.norm.weight"], weight.bfloat16())


def test_what_the_engine_stores_as_one_comes_in_one_piece(model, arch):
    plan = BucketPlan(manifest(arch), torch.float32, 1)
    _, pieces = sent(plan, in_order(arch, model))
    where = {name: index for index, piece in enumerate(pieces) for name in piece}
    for layer in range(2):
        for block in ("self_attn", "mlp"):
            assert len({index for name, index in where.items() if f"layers.{layer}.{block}." in name}) == 1
    # The MLP of this model has 3 x 48 x 32 float32 numbers, more than the bytes asked for.
    assert plan.capacity == 3 * 48 * 32 * 4


def test_modules_that_are_stored_as_one_have_one_group():
    assert group_of("model.layers.3.self_attn.k_proj.bias") == "model.layers.3.self_attn"
    assert group_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp"
    assert group_of("model.layers.3.input_layernorm.weight") == "model.layers.3.input_layernorm"
    assert group_of("lm_head.weight") == "lm_head"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pairs: pairs[:-1], "missing: model.norm.weight"),
        (lambda pairs: [*pairs, ("extra.weight", torch.ones(1))], "extra.weight, .*is unknown"),
        (lambda pairs: [*pairs[:3], pairs[2], *pairs[3:]], "given before"),
        (lambda pairs: [(pairs[0][0], pairs[0][1][:-1]), *pairs[1:]], "embed_tokens.weight, .20, 32., is unknown"),
        (lambda pairs: sorted(pairs, key=lambda pair: "k_proj" in pair[0]), "comes apart"),
    ],
)
def test_a_wrong_stream_is_refused_and_still_read_to_its_end(model, arch, change, words):
    stream = iter(change(in_order(arch, model)))
    with pytest.raises(ValueError, match=words):
        sent(BucketPlan(manifest(arch), torch.float32, 1), stream)
    assert next(stream, None) is None


def test_a_manifest_is_compared_before_anything_is_sent(arch):
    shapes = manifest(arch)
    check_manifest(shapes, shapes)
    wrong = {**shapes, "model.norm.weight": (31,), "extra.weight": (1,)}
    del wrong["model.embed_tokens.weight"]
    with pytest.raises(
        ValueError, match=r"missing: model\.embed_tokens\.weight\n.*extra\.weight\n.*\[31\], not \[32\]"
    ):
        check_manifest(wrong, shapes)


def test_shared_memory_is_given_back(tmp_path):
    buffer = SharedFileBuffer(4096)
    buffer.tensor.fill_(7)
    opened = open_buffer(buffer.handle())
    np.testing.assert_array_equal(opened.numpy(), np.full(4096, 7, np.uint8))
    path = buffer.handle()["file"]
    buffer.close()
    assert not Path(path).exists()
