"""avg@k, pass@k, maj@k and their intervals: numbers by hand, by counting draws one by one, and by a plain loop."""

from itertools import combinations

import numpy as np
import pytest

from exgrpo_megatron.algorithm.estimates import (
    bootstrap_means,
    bootstrap_seed,
    estimate,
    macro_average,
    majority_at_k,
    pass_at_k,
)
from exgrpo_megatron.config import EvalConfig
from exgrpo_megatron.set_evaluation.results import group_averages, markdown, set_result


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (8, 2, 4, 11 / 14),  # 1 - C(6,4)/C(8,4) = 1 - 15/70
        (8, 5, 4, 1.0),  # four samples cannot all be among the three wrong ones
        (32, 0, 32, 0.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["3", "3", "5"], [True, True, False], 1.0),
        (["3", "5", "5"], [True, False, False], 0.0),
        (["3", "5", None], [True, False, False], 0.5),  # a tie of two, one of them right
        (["3", "4", "5"], [True, False, False], 1 / 3),
        (["3", "3.0", "5", "5"], [True, True, False, False], 0.0),  # 3 and 3.0 are two texts
        ([None, None, "3"], [False, False, True], 1.0),  # no answer has no vote
        ([None, None], [False, False], 0.0),
        (["3", "3", "5"], [True, False, False], 0.5),  # one of two equal answers ran out of time
    ],
)
def test_majority_by_hand(answers, correct, expected):
    assert majority_at_k(answers, correct) == pytest.approx(expected)


def test_intervals_are_the_percentiles_of_a_plain_loop():
    values = np.array([1.0, 0.0, 0.5, 0.25, 0.0])
    drawn = np.random.default_rng(7).integers(5, size=(300, 5))
    means = sorted(sum(values[i] for i in row) / 5 for row in drawn.tolist())
    # Linear between neighbours: the 2.5% point of 300 sorted values is at place 299 * 0.025 = 7.475.
    low = means[7] + 0.475 * (means[8] - means[7])
    high = means[291] + 0.525 * (means[292] - means[291])
    found = estimate(values, bootstrap_means({"x": values}, 300, 7)["x"])
    assert found.value == pytest.approx(0.35)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_many_resamples_agree_with_the_normal_approximation():
    """Of 400 questions half of which are right, the standard error is sqrt(0.25 / 400) = 0.025; 1.96 of them."""
    values = np.tile([0.0, 1.0], 200)
    found = estimate(values, bootstrap_means({"x": values}, 4000, 3)["x"])
    assert found.low == pytest.approx(0.5 - 0.049, abs=0.005)
    assert found.high == pytest.approx(0.5 + 0.049, abs=0.005)


def test_one_question_has_no_interval_and_neither_has_its_average():
    one = estimate(np.array([0.5]), np.array([0.5, 0.5]))
    assert (one.value, one.low, one.high) == (0.5, None, None)
    both = macro_average([0.5, 0.3], [None, np.array([0.2, 0.4])])
    assert (both.value, both.low, both.high) == (0.4, None, None)


def _group(correct, extracted, category=None):
    return [
        {"correct": c, "extracted": e, "category": category, "num_tokens": 10, "stop_reason": "stop"}
        for c, e in zip(correct, extracted, strict=True)
    ]


def test_sets_that_name_no_group_are_part_of_no_average():
    config = EvalConfig.model_validate({"sets": {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "temperature": 0}}})
    results = [set_result(name, config, [_group([True], ["1"])]) for name in config.sets]
    assert group_averages(config, results) == {}
    table = markdown("Evaluation", results, {}, "end")
    assert "| a | - | 1 | 1 | 1 | 100.0% | - | - |" in table
    assert "average" not in table
    assert results[0].as_json()["group"] is None


def test_a_set_by_hand():
    sets = {
        "a": {"path": "a.jsonl", "group": "ID", "num_samples": 4},
        "b": {"path": "b.jsonl", "group": "ID"},
        "c": {"path": "c.jsonl", "group": "OOD"},
    }
    config = EvalConfig.model_validate({"sets": sets, "bootstrap_samples": 50, "temperature": 0.6})
    yes, no = True, False
    a = set_result(
        "a",
        config,
        [
            _group([yes, no, no, no], ["1", "2", "3", None], "x"),  # avg 1/4, pass@2 1/2, pass@4 1, maj 1/3
            _group([yes, yes, yes, no], ["1", "1", "1", "2"], "y"),  # avg 3/4, pass@2 1, pass@4 1, maj 1
            _group([no, no, no, no], ["2", "2", "1", "1"], "y"),  # 0, 0, 0, 0
        ],
    )
    values = {name: found.value for name, found in a.estimates.items()}
    assert values == pytest.approx({"avg@4": 1 / 3, "pass@2": 1 / 2, "pass@4": 2 / 3, "maj@4": 4 / 9})
    assert a.by_category == pytest.approx({"x": 1 / 4, "y": 3 / 8})
    assert a.no_answer == pytest.approx(1 / 12)

    b = set_result("b", config, [_group([yes], ["1"]), _group([yes], ["1"])])
    assert list(b.estimates) == ["avg@1"]  # pass@1 and maj@1 would be the same
    averages = group_averages(config, [a, b])
    assert list(averages) == ["ID"]  # c is not there yet
    assert averages["ID"].value == pytest.approx((1 / 3 + 1) / 2)
    draws = np.random.default_rng(bootstrap_seed(123, "a")).integers(3, size=(50, 3))
    means = (np.array([1 / 4, 3 / 4, 0])[draws].mean(axis=1) + 1.0) / 2
    assert averages["ID"].low == pytest.approx(np.percentile(means, 2.5))
    table = markdown("Evaluation", [a, b], averages, "end")
    assert "| a | ID | 3 | 4 | 0.6 | 33.3% [" in table
    assert "| b | ID | 2 | 1 | 0.6 | 100.0% [100.0%, 100.0%] | - | - |" in table
    assert "| **ID average** | ID | | | | **66.7% [" in table
