"""One optimiser step: the same gradient and weights as plain autograd, however the batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_models import (
    FAMILIES,
    hf_state,
    make_actor,
    max_difference,
    plain_adamw,
    plain_logprobs,
    plain_loss,
    random_sequences,
    save_model,
)

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import OptimizerConfig, SchedulerConfig
from exgrpo_megatron.policy.distributed import DataParallel

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_eps=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_equal_plain_autograd_with_adamw(family: str, tmp_path: Path, group: DataParallel) -> None:
    model = save_model(family, tmp_path)
    actor = make_actor(tmp_path, group, OPTIMIZER, train_micro_batch_size=4, max_grad_norm=0.05)
    plain = plain_adamw(model, OPTIMIZER)
    for seed in range(2):
        sequences = random_sequences(10, seed)
        result = actor.update(sequences, Objective(), temperature=0.8)
        plain.zero_grad()
        loss = plain_loss(model, sequences, temperature=0.8)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        plain.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05  # so that clipping is part of what is compared
        assert not result.skipped
    assert max_difference(dict(actor.export_weights()), hf_state(model)) < 1e-5
    assert actor.version == 2


@pytest.mark.parametrize(
    "batching",
    [
        {"train_micro_batch_size": 1},
        {"train_micro_batch_size": 2},
        {"max_total_sequence_length": 22, "dynamic_batching": {"enabled": True, "train_mb_tokens": 40}},
        {"max_total_sequence_length": 22, "sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
    ],
    ids=["1", "2", "dynamic", "packed"],
)
def test_the_result_does_not_depend_on_micro_batches(
    batching: dict[str, Any], tmp_path: Path, group: DataParallel
) -> None:
    save_model("qwen2", tmp_path)
    sequences = random_sequences(7)
    optimizer = OptimizerConfig(lr=1e-3, adam_eps=1e-4)
    whole = make_actor(tmp_path, group, optimizer, train_micro_batch_size=7)
    parts = make_actor(tmp_path, group, optimizer, **batching)
    expected = whole.update(sequences, Objective(), temperature=1.0)
    result = parts.update(sequences, Objective(), temperature=1.0)
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, abs=1e-6)
    assert max_difference(dict(parts.export_weights()), dict(whole.export_weights())) < 1e-6
    np.testing.assert_allclose(result.terms.log_ratio, expected.terms.log_ratio, atol=1e-6)


def test_terms_are_those_before_the_update_in_the_order_given(tmp_path: Path, group: DataParallel) -> None:
    model = save_model("qwen2", tmp_path)
    sequences = random_sequences(5)
    terms = make_actor(tmp_path, group, train_micro_batch_size=2).update(sequences, Objective(), temperature=1.0).terms
    with torch.no_grad():
        plain = [plain_logprobs(model, item.prompt_ids, item.response_ids, 1.0) for item in sequences]
    log_ratio = np.concatenate(
        [logprobs.numpy() - item.old_logprobs for (logprobs, _), item in zip(plain, sequences, strict=True)]
    )
    advantage = np.concatenate([np.full(len(item.response_ids), item.advantage) for item in sequences])
    replayed = np.concatenate([np.full(len(item.response_ids), item.replayed) for item in sequences])
    np.testing.assert_allclose(terms.log_ratio, log_ratio, atol=1e-5)
    np.testing.assert_allclose(terms.entropy, torch.cat([entropies for _, entropies in plain]), atol=1e-5)
    np.testing.assert_allclose(terms.advantage, advantage, rtol=1e-6)
    np.testing.assert_array_equal(terms.replayed, replayed)
    # Clipped: a fresh token whose ratio is over 1.2 at a positive advantage, or under 0.8 at a negative one.
    above = (log_ratio > math.log(1.2)) & (advantage > 0)
    below = (log_ratio < math.log(0.8)) & (advantage < 0)
    np.testing.assert_array_equal(terms.clipped, (above | below) & ~replayed)
    assert terms.clipped.any()


def test_prompt_tokens_carry_no_loss(tmp_path: Path, group: DataParallel) -> None:
    """The loss and its gradient are those of the response alone, as a loop over response positions gives them."""
    model = save_model("llama", tmp_path)
    item = replace(random_sequences(1)[0], advantage=1.0, policy_weight=1.0, entropy_weight=0.0)
    result = make_actor(tmp_path, group).update([item], Objective(kind="nll"), temperature=1.0)
    logprobs, _ = plain_logprobs(model, item.prompt_ids, item.response_ids, 1.0)
    loss = -logprobs.sum()
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_gradient_above_the_bound_changes_nothing(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    sequences = random_sequences(4)
    actor = make_actor(tmp_path, group, OPTIMIZER, skip_grad_norm_above=1.0)
    untouched = make_actor(tmp_path, group, OPTIMIZER, skip_grad_norm_above=1.0)
    before = dict(actor.export_weights())
    huge = [replace(item, policy_weight=1e3) for item in sequences]
    result = actor.update(huge, Objective(), temperature=1.0)
    assert result.skipped
    assert result.grad_norm > 1.0
    assert actor.version == 0
    assert max_difference(dict(actor.export_weights()), before) == 0
    # Nor did it leave anything in the optimizer's state or in the schedule: the next step is that of a new actor.
    assert actor.update(sequences, Objective(), temperature=1.0) is not None
    untouched.update(sequences, Objective(), temperature=1.0)
    assert max_difference(dict(actor.export_weights()), dict(untouched.export_weights())) == 0


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_an_update_that_is_not_to_be_applied_changes_no_bit_whatever_its_norm(
    weight: float, tmp_path: Path, group: DataParallel
) -> None:
    save_model("qwen2", tmp_path)
    actor = make_actor(tmp_path, group, OPTIMIZER)
    before = {name: tensor.clone() for name, tensor in actor.export_weights()}
    sequences = [replace(item, policy_weight=weight, entropy_weight=0.0) for item in random_sequences(2)]
    result = actor.update(sequences, Objective(), temperature=1.0, apply=False)
    # The gradient is the weight times something; of 0 a step would still decay the weights.
    assert (result.grad_norm == 0.0, result.skipped, actor.version) == (weight == 0, True, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.export_weights())


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    actor = make_actor(tmp_path, group)
    before = dict(actor.export_weights())
    broken = [replace(item, advantage=math.nan) for item in random_sequences(2)]
    result = actor.update(broken, Objective(), temperature=1.0)
    assert result.skipped
    assert math.isnan(result.grad_norm)
    assert max_difference(dict(actor.export_weights()), before) == 0


def test_a_denominator_that_is_not_finite_changes_nothing(tmp_path: Path, group: DataParallel) -> None:
    """The loss shows it, whatever the kernel makes of the ratio's gradient."""
    save_model("qwen2", tmp_path)
    actor = make_actor(tmp_path, group)
    before = dict(actor.export_weights())
    first, *others = random_sequences(2)
    broken = replace(first, old_logprobs=np.full(len(first.response_ids), np.nan, np.float32))
    result = actor.update([broken, *others], Objective(), temperature=1.0)
    assert result.skipped
    assert math.isnan(result.loss)
    assert max_difference(dict(actor.export_weights()), before) == 0


def test_the_bonus_per_micro_batch_is_the_mean_entropy_of_each(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    sequences = random_sequences(4)
    plain = make_actor(tmp_path, group, train_micro_batch_size=2).update(sequences, Objective(), temperature=1.0)
    bonus = make_actor(tmp_path, group, train_micro_batch_size=2).update(
        sequences, Objective(), temperature=1.0, micro_batch_entropy_coeff=0.5
    )
    lengths = [len(item.response_ids) for item in sequences]
    per_sequence = np.split(plain.terms.entropy, np.cumsum(lengths)[:-1])
    order = sorted(range(4), key=lambda index: -len(sequences[index].prompt_ids) - lengths[index])
    means = [np.concatenate([per_sequence[index] for index in half]).mean() for half in (order[:2], order[2:])]
    assert bonus.loss == pytest.approx(plain.loss - 0.5 * sum(means), abs=1e-6)


def test_no_sequences_make_a_step_without_a_gradient(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    result = make_actor(tmp_path, group).update([], Objective(), temperature=1.0)
    assert (result.loss, result.grad_norm, len(result.terms.entropy)) == (0, 0, 0)


def test_old_logprobs_must_fit_the_response(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    item = random_sequences(1)[0]
    short = replace(item, old_logprobs=item.old_logprobs[:-1])
    with pytest.raises(ValueError, match=r"sequence 0 has .* old log-probs for"):
        make_actor(tmp_path, group).update([short], Objective(), temperature=1.0)


@pytest.mark.parametrize(
    ("style", "first", "expected"),
    [
        # Warm-up over 2 steps from 0 to 1, then linear or half a cosine to 0.1 at step 6; halfway down at step 4.
        ("constant", 0.0, [0, 0.5, 1, 1, 1, 1, 1]),
        ("constant", 0.2, [0.2, 0.6, 1, 1, 1, 1, 1]),
        ("linear", 0.0, [0, 0.5, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", 0.0, [0, 0.5, 1, 0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.55 - 0.45 * math.sqrt(0.5), 0.1]),
    ],
)
def test_the_learning_rate_follows_the_schedule(
    style: str, first: float, expected: list[float], tmp_path: Path, group: DataParallel
) -> None:
    save_model("qwen2", tmp_path)
    actor = make_actor(
        tmp_path,
        group,
        OptimizerConfig(lr=1.0, min_lr=0.1),
        SchedulerConfig(lr_decay_style=style, lr_warmup_iters=2, lr_warmup_init=first),
        total_updates=6,
    )
    rates = [actor.update([], Objective(), temperature=1.0).learning_rate for _ in range(7)]
    assert rates == pytest.approx(expected)
