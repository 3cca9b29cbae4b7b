"""Loss constants, minibatches and shares by rank, against hand calculations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from exgrpo_megatron.algorithm.batch import balanced_shares, minibatches, objective, train_sequences
from exgrpo_megatron.algorithm.length_penalty import length_penalty
from exgrpo_megatron.config import Config
from exgrpo_megatron.types import Group, Question, Trajectory

GENERATOR_SET = {"generator": "chain_arithmetic"}
WIDTH = 96


def config(**sections: Any) -> Config:
    raw = {"data": {"train": GENERATOR_SET}, "policy": {"model_name": "m"}, **sections}
    loaded = Config.model_validate(raw)
    assert loaded.policy.generation.max_new_tokens == WIDTH
    return loaded


def member(length: int, reward: float, replayed: bool = False) -> Trajectory:
    ids = np.arange(length, dtype=np.int32)
    return Trajectory(ids, -0.1 * ids.astype(np.float32), reward, replayed, "stop", policy_version=3)


def group(name: str, *members: Trajectory) -> Group:
    return Group(Question(name, np.array([1, 2], dtype=np.int32), "42"), members)


@pytest.fixture
def groups() -> list[Group]:
    """Four sequences with 10 + 20 + 30 + 40 = 100 response tokens."""
    return [group("a", member(10, 1.0), member(20, 0.0)), group("b", member(30, 0.0), member(40, 1.0, replayed=True))]


def test_sequences_carry_their_group_members_in_order(groups: list[Group]):
    sequences = train_sequences(groups, config(), data_parallel_size=1)
    assert [len(sequence.response_ids) for sequence in sequences] == [10, 20, 30, 40]
    assert [sequence.advantage for sequence in sequences] == [0.5, -0.5, -0.5, 0.5]
    assert [sequence.replayed for sequence in sequences] == [False, False, False, True]
    last = groups[1].trajectories[1]
    assert sequences[3].old_logprobs is last.logprobs
    assert sequences[3].response_ids is last.token_ids
    assert sequences[3].num_tokens == 42


@pytest.mark.parametrize(
    ("normalizer", "data_parallel_size", "divisors"),
    [
        ("global_width", 1, [4 * 96] * 4),
        ("global_width", 2, [4 * 96] * 4),
        ("per_answer_length", 2, [4 * 10, 4 * 20, 4 * 30, 4 * 40]),
        ("global_tokens", 2, [100] * 4),
        ("rank_width", 1, [96] * 4),
        ("rank_width", 2, [2 * 96] * 4),
    ],
)
def test_each_normalizer_divides_by_what_it_says(
    groups: list[Group], normalizer: str, data_parallel_size: int, divisors: list[int]
):
    sequences = train_sequences(
        groups, config(loss_fn={"normalizer": normalizer}), data_parallel_size=data_parallel_size
    )
    assert [sequence.policy_weight for sequence in sequences] == pytest.approx([1 / divisor for divisor in divisors])


def test_rank_width_sums_over_sequences_as_the_released_code_does():
    """Released code: n identical full-width sequences of advantage and ratio 1 have loss -1, -2, -64 for n=1, 2, 64."""
    for pairs in (1, 2, 64):
        full = [group(str(i), member(WIDTH, 1.0), member(WIDTH, 0.0)) for i in range(pairs)]
        sequences = train_sequences(full, config(loss_fn={"normalizer": "rank_width"}), data_parallel_size=1)
        loss_at_ratio_and_advantage_one = -sum(s.policy_weight * WIDTH for s in sequences)
        assert loss_at_ratio_and_advantage_one == pytest.approx(-2 * pairs)


@pytest.mark.parametrize(("bonus", "weight"), [("global_mean", 0.001 / 100), ("per_micro_batch", 0.0), ("none", 0.0)])
def test_the_entropy_weight_is_the_coefficient_over_the_response_tokens_of_the_optimiser_step(
    groups: list[Group], bonus: str, weight: float
):
    sequences = train_sequences(groups, config(loss_fn={"entropy_bonus": bonus}), data_parallel_size=2)
    assert [sequence.entropy_weight for sequence in sequences] == pytest.approx([weight] * 4)


def test_advantages_follow_the_recipe(groups: list[Group]):
    """Two members, one correct: unbiased deviation is sqrt(0.5), with 1e-6 added; leave-one-out doubles to 1."""
    normalized = train_sequences(groups, config(grpo={"normalize_rewards": True}), data_parallel_size=1)
    assert normalized[0].advantage == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
    left_out = train_sequences(groups, config(grpo={"use_leave_one_out_baseline": True}), data_parallel_size=1)
    assert left_out[0].advantage == pytest.approx(1.0)


def test_leave_one_out_advantages_do_not_depend_on_the_ranks():
    """Numbers as in test_advantages.py, whatever rank a member is trained on."""
    members = [member(1 + i, 1.0 if i < correct else 0.0) for correct in (1, 2) for i in range(8)]
    groups = [group("one", *members[:8]), group("two", *members[8:])]
    both = config(grpo={"normalize_rewards": True, "use_leave_one_out_baseline": True})
    expected = [1.0, *[-0.377963] * 7, *[2.267781] * 2, *[-0.585539] * 6]
    for data_parallel_size in (1, 2, 4):
        sequences = train_sequences(groups, both, data_parallel_size=data_parallel_size)
        assert [sequence.advantage for sequence in sequences] == pytest.approx(expected, abs=1e-6)


def test_groups_of_different_sizes_are_refused(groups: list[Group]):
    with pytest.raises(ValueError, match=r"of one size, found \[2, 3\]"):
        train_sequences(
            [*groups, group("c", member(1, 0.0), member(1, 0.0), member(1, 1.0))], config(), data_parallel_size=1
        )


@pytest.mark.parametrize(("variant", "clip_in_mixed"), [("paper", True), ("code", False), ("corrected", False)])
def test_new_tokens_are_clipped_on_policy_and_in_the_mixed_phase_as_the_variant_says(variant: str, clip_in_mixed: bool):
    loaded = config(variant=variant)
    assert objective(loaded, mixed=False).clip
    assert objective(loaded, mixed=True).clip is clip_in_mixed


def test_the_objective_takes_its_constants_from_the_recipe():
    loaded = config(
        loss_fn={"ratio_clip_min": 0.3, "ratio_clip_max": 0.28, "max_abs_log_ratio": 5.0},
        experience={"shaping": "sqrt"},
    )
    got = objective(loaded, mixed=True)
    assert (got.kind, got.clip_min, got.clip_max, got.max_abs_log_ratio) == ("ratio", 0.3, 0.28, 5.0)
    assert (got.shaping, got.shaping_beta) == ("sqrt", 0.1)
    assert objective(config(), mixed=True).shaping == "ratio"


@pytest.mark.parametrize(
    ("normalizer", "data_parallel_size", "divisors"),
    [
        ("global_width", 2, [3 * 96] * 3),
        ("per_answer_length", 2, [3 * 10, 3 * 30, 3 * 40]),
        ("rank_width", 2, [2 * 96] * 3),
    ],
)
def test_truncated_answers_that_are_filtered_are_in_no_count_but_in_the_baseline(
    groups: list[Group], normalizer: str, data_parallel_size: int, divisors: list[int]
):
    cut = replace(groups[0].trajectories[1], stop_reason="length")
    some = [replace(groups[0], trajectories=(groups[0].trajectories[0], cut)), groups[1]]
    loaded = config(grpo={"overlong_filtering": True}, loss_fn={"normalizer": normalizer})
    sequences = train_sequences(some, loaded, data_parallel_size=data_parallel_size)
    assert [len(sequence.response_ids) for sequence in sequences] == [10, 30, 40]
    assert [sequence.advantage for sequence in sequences] == [0.5, -0.5, 0.5]
    assert [sequence.policy_weight for sequence in sequences] == pytest.approx([1 / divisor for divisor in divisors])
    # 80 tokens are left; rank_width counts no sequences.
    assert [sequence.entropy_weight for sequence in sequences] == pytest.approx([0.001 / 80] * 3)
    assert len(train_sequences(some, config(), data_parallel_size=1)) == 4


def test_nothing_is_left_of_a_step_whose_answers_were_all_cut(groups: list[Group]):
    cut = [replace(g, trajectories=tuple(replace(m, stop_reason="length") for m in g.trajectories)) for g in groups]
    assert train_sequences(cut, config(grpo={"overlong_filtering": True}), data_parallel_size=1) == []


def test_the_penalty_of_long_answers_grows_over_the_buffer_and_changes_advantages_alone(groups: list[Group]):
    """From 20 tokens to 40: answers of 10, 20, 30 and 40 tokens lose 0, 0, 0.3 and 0.6."""
    shaping = {"enabled": True, "overlong_buffer_length": 20, "overlong_buffer_penalty": 0.6, "max_response_length": 40}
    loaded = config(grpo={"reward_shaping": shaping})
    assert [length_penalty(length, loaded) for length in (10, 20, 30, 40, 90)] == pytest.approx([0, 0, 0.3, 0.6, 0.6])
    sequences = train_sequences(groups, loaded, data_parallel_size=1)
    # Second group: rewards -0.3 and 0.4 with mean 0.05.
    assert [sequence.advantage for sequence in sequences] == pytest.approx([0.5, -0.5, -0.35, 0.35])
    assert [group.num_correct for group in groups] == [1, 1]
    assert length_penalty(90, config()) == 0


def test_every_pass_deals_out_all_groups_in_an_order_of_its_own():
    eight = [group(str(i), member(1, 0.0), member(1, 1.0)) for i in range(8)]
    parts = minibatches(eight, 2, np.random.default_rng(5), num_passes=3)
    assert [len(part) for part in parts] == [4] * 6
    orders = [[one.question.id for part in parts[start : start + 2] for one in part] for start in (0, 2, 4)]
    assert all(sorted(order) == [str(i) for i in range(8)] for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_minibatches_partition_the_groups_and_depend_only_on_the_generator():
    eight = [group(str(i), member(1, 0.0), member(1, 1.0)) for i in range(8)]
    halves = minibatches(eight, 2, np.random.default_rng(5))
    again = minibatches(eight, 2, np.random.default_rng(5))
    names = [[g.question.id for g in half] for half in halves]
    assert [len(half) for half in names] == [4, 4]
    assert sorted(names[0] + names[1]) == [str(i) for i in range(8)]
    assert names == [[g.question.id for g in half] for half in again]
    assert names[0] + names[1] != [str(i) for i in range(8)]


@pytest.mark.parametrize(("num_groups", "parts"), [(8, 3), (0, 2)])
def test_groups_that_do_not_divide_are_refused(num_groups: int, parts: int):
    some = [group(str(i), member(1, 0.0), member(1, 1.0)) for i in range(num_groups)]
    with pytest.raises(ValueError, match="cannot be dealt out equally"):
        minibatches(some, parts, np.random.default_rng(0))


def test_shares_are_balanced_by_hand():
    """Longest first in rounds of two: 9|8, then 7 to the lighter (8) and 6 to 9, then the tie 15|15 to rank 0."""
    assert balanced_shares([6, 9, 1, 8, 7], 2) == [[1, 0, 2], [3, 4]]


def test_shares_cover_all_sequences_equally_many_and_within_one_longest_sequence():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 9))
        lengths = rng.integers(1, 500, int(rng.integers(0, 60))).tolist()
        shares = balanced_shares(lengths, size)
        assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
        counts = [len(share) for share in shares]
        totals = [sum(lengths[index] for index in share) for share in shares]
        assert max(counts) - min(counts) <= 1
        assert max(totals) - min(totals) <= max(lengths, default=0)


def test_only_groups_that_differ_are_scaled_by_their_share():
    """Two of three groups have no advantage: the third has 3/1 of its own, +-1/2."""
    groups = [
        group("a", member(1, 1.0), member(1, 0.0)),
        group("b", member(1, 1.0), member(1, 1.0)),
        group("c", member(1, 0.0), member(1, 0.0)),
    ]
    sequences = train_sequences(groups, config(grpo={"scale_by_informative_groups": True}), data_parallel_size=1)
    assert [sequence.advantage for sequence in sequences] == [1.5, -1.5, 0, 0, 0, 0]


def test_without_a_ratio_the_objective_is_the_supervised_one():
    keys = {"loss_fn": {"disable_ppo_ratio": True}, "experience": {"enabled": False}}
    assert objective(config(**keys), mixed=False).kind == "nll"
