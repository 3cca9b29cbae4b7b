"""The index: moves, removals and draws within a bucket."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from exgrpo_megatron.experience.index import QuestionIndex


def filled(names: str, bucket: int = 2, group_size: int = 4) -> QuestionIndex:
    index = QuestionIndex(group_size)
    for name in names:
        index.put(name, bucket, num_answers=1)
    return index


def test_the_last_question_of_a_bucket_takes_the_place_of_a_removed_one():
    index = filled("abcd")
    index.remove("b")
    assert list(index.items()) == [("a", 2), ("d", 2), ("c", 2)]
    index.remove("c")
    index.remove("a")
    assert list(index.items()) == [("d", 2)]


def test_a_question_moves_to_its_latest_bucket_only():
    """The released code leaves {3: [], 6: [5]} after (5, 3) and (5, 6)."""
    index = filled("a", bucket=1)
    index.put("a", 3, num_answers=2)
    assert index.sizes.tolist() == [0, 0, 1]
    assert (index.bucket("a"), index.num_answers("a"), len(index)) == (3, 2, 1)


def test_the_same_bucket_again_changes_the_number_of_answers_and_not_the_order():
    index = filled("abc")
    index.put("a", 2, num_answers=5)
    assert [name for name, _ in index.items()] == ["a", "b", "c"]
    assert index.num_answers("a") == 5


@pytest.mark.parametrize("excluded", ["", "a", "f", "ace", "bdf", "abcde"])
def test_a_draw_is_uniform_over_what_is_not_excluded(excluded: str):
    index = filled("abcdef")
    positions = index.positions([*excluded, "unknown"])[1]
    rng = np.random.default_rng(0)
    rest = set("abcdef") - set(excluded)
    draws = 3000
    seen = Counter(index.sample(1, 1, positions, rng)[0] for _ in range(draws))
    assert set(seen) == rest
    probability = 1 / len(rest)
    error = (probability * (1 - probability) / draws) ** 0.5
    assert all(abs(count / draws - probability) <= 4 * error for count in seen.values())


def test_all_that_is_not_excluded_can_be_drawn_at_once():
    index = filled("abcdef")
    positions = index.positions(["b", "e"])[1]
    assert sorted(index.sample(1, 4, positions, np.random.default_rng(0))) == ["a", "c", "d", "f"]
    assert index.sample(1, 0, [0, 1, 2, 3, 4, 5], np.random.default_rng(0)) == []


def test_putting_the_items_into_an_empty_index_restores_every_later_draw():
    index = filled("abcdefgh")
    for name in "cfa":
        index.put(name, 3, num_answers=1)
    copy = QuestionIndex(4)
    for name, bucket in index.items():
        copy.put(name, bucket, num_answers=1)
    for cell, size in ((1, 5), (2, 3)):
        first = index.sample(cell, size - 1, [], np.random.default_rng(7))
        assert first == copy.sample(cell, size - 1, [], np.random.default_rng(7))


def test_the_entropy_at_a_percentile_is_that_of_a_sorted_list():
    """Of those that are stored: below 0 counts as 0; every fifth question leaves."""
    rng = np.random.default_rng(0)
    index = QuestionIndex(4, with_entropies=True)
    values = np.concatenate([rng.exponential(0.3, 300), rng.normal(0, 1e-6, 100), np.full(100, 0.25), [-0.0]])
    values = rng.permutation(values).astype(np.float32)
    for i in range(len(values)):
        index.put(str(i), 1, num_answers=1)
    index.set_entropies(np.arange(len(values)), values)
    for i in range(0, len(values), 5):
        index.remove(str(i))
    left = np.sort(np.maximum(values[np.arange(len(values)) % 5 > 0], 0))
    for percentile in (0.1, 25, 50, 60, 99.9):
        assert index.entropy_at(percentile) == left[int(np.ceil(percentile * len(left) / 100)) - 1]
