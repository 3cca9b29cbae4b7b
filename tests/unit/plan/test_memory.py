"""Bytes of the plan, by hand."""

import pytest

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.plan.activations import TokenLayout, boundary_bytes, head_bytes, layer_bytes, loss_bytes
from exgrpo_megatron.plan.experience_memory import experience_bytes
from exgrpo_megatron.plan.known_models import KNOWN_MODELS
from exgrpo_megatron.plan.parameters import stages
from exgrpo_megatron.plan.ranks import Ranks
from exgrpo_megatron.plan.rollout_memory import embedded_rollout, kv_token_bytes, vllm_rollout
from exgrpo_megatron.plan.training_memory import held_bytes, passes_in_flight

QWEN_7B = Architecture.from_hf_config(KNOWN_MODELS["Qwen/Qwen2.5-Math-7B"])
PARAMETERS = 7_615_616_512


def test_the_optimizer_takes_12_bytes_a_weight_in_bfloat16_and_8_in_float32():
    (stage,) = stages(QWEN_7B, MegatronConfig())
    alone, plain = Ranks(1, 1, 1, 1), MegatronConfig()
    half, single = (held_bytes(stage, alone, plain, number_bytes) for number_bytes in (2, 4))
    assert (half.weights, half.gradients, half.optimizer) == (2 * PARAMETERS, 4 * PARAMETERS, 12 * PARAMETERS)
    assert (single.weights, single.gradients, single.optimizer) == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS)


def test_the_distributed_optimizer_shares_that_out_among_data_and_context_parallel_ranks():
    (stage,) = stages(QWEN_7B, MegatronConfig())
    layout = MegatronConfig(optimizer={"use_distributed_optimizer": True})
    for ranks in (Ranks(1, 1, 8, 1), Ranks(1, 2, 4, 1)):
        held = held_bytes(stage, ranks, layout, 2)
        assert held.weights == pytest.approx(2 * PARAMETERS, rel=1e-6)
        assert held.optimizer == pytest.approx(12 * PARAMETERS / 8, rel=1e-5)


def test_fp8_keeps_two_bytes_more_of_each_number_in_a_matrix_of_the_layers():
    """28 layers of 3584 x (3584 + 2 x 512) and 3584 x 3584 for attention, 3 x 3584 x 18944 for the MLP."""
    layout = MegatronConfig(fp8_cfg={"enabled": True})
    (stage,) = stages(QWEN_7B, layout)
    held, without = (held_bytes(stage, Ranks(1, 1, 1, 1), each, 2) for each in (layout, MegatronConfig()))
    assert held.fp8_weights == 2 * 28 * 3584 * (3584 + 2 * 512 + 3584 + 3 * 18944)
    assert held.total - without.total == held.fp8_weights


def test_activations_of_a_layer_of_7b_by_hand():
    """Two tensor-parallel ranks with sequence parallel, bfloat16, a position: norms 2 x 3584 x 10 / 2; queries, keys
    and values 1792 + 2 x 256, attended 2 x 1792, 4 x 128, and 5 x 9472, of 2 bytes; 14 heads and 2 norms of 4."""
    one = TokenLayout(1, 1, 2, True, 2)
    attention = (1792 + 512) + 2 * 1792 + 4 * 128
    assert layer_bytes(QWEN_7B, one) == 35840 + 2 * attention + 2 * 5 * 9472 + 4 * 16
    assert boundary_bytes(QWEN_7B, one) == 3584 * 2 // 2
    assert head_bytes(QWEN_7B, one) == 3584 * 8 // 2 + 3584 * 2


def test_hidden_states_without_sequence_parallel_are_not_shared():
    assert boundary_bytes(QWEN_7B, TokenLayout(10, 10, 2, False, 2)) == 10 * 3584 * 2


@pytest.mark.parametrize(
    ("kernel", "chunk_size", "logits"),
    [
        ("auto", None, 716),  # min(1024, a fifth of the hidden size)
        ("linear", 100, 100),
        ("linear", 100_000, 20_000),
        ("logits", None, 20_000),
    ],
)
def test_the_loss_of_20000_tokens_of_7b_by_hand(kernel, chunk_size, logits):
    """Two tensor-parallel ranks, bfloat16: logits in float32 and their gradient once more in bfloat16; the gradient of
    the weight in float32, and that of the hidden states."""
    tokens = TokenLayout(20_000, 20_000, 2, False, 2, kernel, chunk_size)
    assert loss_bytes(QWEN_7B, tokens, backward=False) == logits * 76032 * 4
    assert loss_bytes(QWEN_7B, tokens, backward=True) == logits * 76032 * 6 + 3584 * (76032 * 4 + 20_000 * 2)


def test_the_reference_kernel_has_six_times_the_logits_and_everything_in_float32():
    tokens = TokenLayout(20_000, 20_000, 2, False, 2, "reference")
    copies = 3584 * (76032 + 20_000) * 4
    assert loss_bytes(QWEN_7B, tokens, backward=False) == 5 * 20_000 * 76032 * 4
    gradients = 3584 * (76032 * 4 + 20_000 * 2)
    assert loss_bytes(QWEN_7B, tokens, backward=True) == 6 * 20_000 * 76032 * 4 + copies + gradients


@pytest.mark.parametrize(
    ("chunks", "micro_batches", "expected"),
    [
        (1, 100, [4, 3, 2, 1]),
        (1, 2, [2, 2, 2, 1]),
        # Interleaved, 2 chunks: 2 x stages behind + one round of 4, and the one in work.
        (2, 100, [11, 9, 7, 5]),
        (2, 4, [8, 8, 7, 5]),
        (2, 1, [8, 8, 7, 5]),  # a round is filled up
    ],
)
def test_passes_in_flight_on_four_stages(chunks, micro_batches, expected):
    found = stages(QWEN_7B, MegatronConfig(pipeline_model_parallel_size=4), 1)
    if chunks == 2:
        found = [stage.__class__(stage.index, stage.num_layers, stage.is_last, stage.chunks * 2) for stage in found]
    assert [passes_in_flight(stage, 4, micro_batches) for stage in found] == expected


def test_keys_and_values_of_a_position_of_7b():
    assert kv_token_bytes(QWEN_7B, 2) == 2 * 28 * 4 * 128 * 2 == 57_344
    assert kv_token_bytes(QWEN_7B, 2, tensor_parallel=4) == 57_344 // 4


def test_the_embedded_engine_has_the_whole_model_in_float32_and_twice_while_it_is_loaded():
    engine = embedded_rollout(QWEN_7B, rows=4, columns=100)
    assert (engine.weights, engine.loading, engine.kv_cache) == (4 * PARAMETERS, 4 * PARAMETERS, 400 * 2 * 57_344)


def test_vllm_has_what_it_is_given():
    budget = 40 << 30
    engine = vllm_rollout(QWEN_7B, budget=budget, kv_cache=None, tensor_parallel=2, number_bytes=2)
    assert engine.weights == PARAMETERS
    assert engine.kv_cache == budget - PARAMETERS
    assert engine.kv_tokens == (budget - PARAMETERS) // 28_672


def test_experience_is_bounded_by_answers_of_the_greatest_length():
    found = experience_bytes(questions=10, answers=80, tokens=100, owners=3)
    assert found.table == 27 * 40
    assert found.disk == 27 * (80 + 700)
    assert found.index == 1000
