"""Which questions are drawn under each definition of difficulty, range, percentile, and with categories."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks
from test_question_stats import group
from test_ranks import play, replicated

from exgrpo_megatron.comm import Communicator, SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.categories import Categories
from exgrpo_megatron.experience.difficulty import bucket_of, variance_rate
from exgrpo_megatron.experience.question_draw import at_place, mean_ranks
from exgrpo_megatron.types import Group, Question, Trajectory

K = 4
DRAWS = 1500


def buffer_of(comm: Communicator | None = None, folder: Path | None = None, **keys: Any) -> ExperienceBuffer:
    categories = keys.pop("categories", None)
    config = ExperienceConfig.model_validate({"bucket_weight": "counts", **keys})
    return ExperienceBuffer(config, K, comm or SingleProcess(), folder, categories=categories)


def planted(buffer: ExperienceBuffer, buckets: dict[str, int]) -> ExperienceBuffer:
    """Questions with k of 4 right."""
    for name, k in buckets.items():
        buffer.record([group(name, [1.0] * k + [0.0] * (K - k))], step=0, collect=True)
    return buffer


def everyone(buffer: ExperienceBuffer) -> set[str]:
    """All that a draw can give."""
    return set(buffer.draw(1000, np.random.default_rng(0)))


def drawn_one_by_one(buffer: ExperienceBuffer, draws: int = DRAWS) -> Counter[str]:
    rng = np.random.default_rng(0)
    return Counter(buffer.draw(1, rng)[0] for _ in range(draws))


def assert_law(seen: Counter[str], expected: dict[str, float], draws: int = DRAWS) -> None:
    """Within four standard errors."""
    assert set(seen) <= {name for name, share in expected.items() if share > 0}
    for name, share in expected.items():
        assert abs(seen[name] / draws - share) <= 4 * (share * (1 - share) / draws) ** 0.5, (name, seen[name], share)


# difficulty


def test_a_rate_is_rounded_to_kths_within_the_buckets():
    """By hand, in eighths: .06 is .48 (0, held at 1), .1875 is 1.5 (up), .3 is 2.4, .97 is 7.76 (8, held at 7)."""
    assert bucket_of(np.array([0.06, 0.1875, 0.3, 0.97]), 8).tolist() == [1, 2, 2, 7]


def test_the_variance_of_right_and_wrong_answers_gives_back_their_share():
    for size in (4, 8, 15):
        k = np.arange(size + 1)
        p = k / size
        np.testing.assert_allclose(variance_rate(p, (p * (1 - p)).astype(np.float32)), p, atol=2e-4)
    # .5 -+ root(.25 - .16), by the side of the mean; more than .25 cannot be.
    np.testing.assert_allclose(variance_rate(np.array([0.4, 0.6, 3.0]), np.array([0.16, 0.16, 9.0])), [0.2, 0.8, 0.5])
    # From -1 to 3: the middle is 1, the square of the distance 16.
    scaled = variance_rate(np.array([0.9, 1.1]), 16 * np.array([0.16, 0.16]), -1, 3)
    np.testing.assert_allclose(scaled, [0.2, 0.8])


def test_the_window_decides_the_bucket_and_not_the_last_group():
    """Window 8 of K = 4: a: 3 of 4, then 0 of 4 right, so 3 of 8; b: 1, 3, 3 of 4, of which the last 8 have 6."""
    buffer = buffer_of(difficulty="window", difficulty_window=8)
    planted(buffer, {"a": 3, "b": 1})
    assert dict(buffer.questions()) == {"a": 3, "b": 1}
    planted(buffer, {"a": 0})
    assert dict(buffer.questions()) == {"a": 2, "b": 1}  # 3/8 of 4 is 1.5
    planted(buffer, {"b": 3})
    assert dict(buffer.questions())["b"] == 2
    planted(buffer, {"b": 3})
    assert dict(buffer.questions())["b"] == 3


def test_rewards_between_0_and_1_are_placed_by_their_variance():
    """.9 .9 .1 .1: variance .16, mean .5: rate .8. .3 .1 .1 .1: variance .0075, mean .15: rate .00756."""
    buffer = buffer_of(difficulty="reward_variance")
    buffer.record([group("a", [0.9, 0.9, 0.1, 0.0])], step=0, collect=True)
    buffer.record([group("a", [0.9, 0.9, 0.1, 0.1])], step=1, collect=True)
    assert dict(buffer.questions()) == {}  # all right: retired
    buffer.record([group("b", [0.4, 0.4, 0.0, 0.0])], step=1, collect=True)  # variance .04, mean .2: rate .0417
    buffer.record([group("c", [1.0, 1.0, 0.0, 0.0]), group("d", [1.0, 0.9, 0.8, 0.0])], step=1, collect=True)
    # d: mean .675, variance .156875: .5 + root(.093125) = .80517, of 4 3.22.
    assert dict(buffer.questions()) == {"b": 1, "c": 2, "d": 3}


def test_binary_rewards_have_the_buckets_of_the_last_group():
    """But for groups without a right answer: last_group leaves their questions where they were."""
    buffers = [buffer_of(), buffer_of(difficulty="reward_variance")]
    rng = np.random.default_rng(0)
    for step in range(30):
        groups = [group(f"q{i}", [1.0] * (k := int(rng.integers(1, K))) + [0.0] * (K - k)) for i in range(5)]
        for buffer in buffers:
            buffer.record(groups, step=step, collect=True)
    assert list(buffers[0].questions()) == list(buffers[1].questions())


# difficulty_range

FIVE = {"a": 1, "b": 1, "c": 2, "d": 3, "e": 3}


@pytest.mark.parametrize(
    ("limits", "unit", "expected"),
    [
        ((0.3, 0.7), "rate", "c"),
        ((0.25, 0.5), "rate", "abc"),
        ((0.26, 0.74), "rate", "c"),
        ((0.0, 1.0), "rate", "abcde"),
        ((0.8, 1.0), "rate", ""),
        # Of the rates .25 .25 .5 .75 .75: the smallest that 3/10 (1.5, so 2) of them do not exceed is .25; 4/10 .25;
        # 5/10 (2.5, so 3) .5; 6/10 .5; 7/10 .75.
        ((0.3, 0.6), "quantile", "abc"),
        ((0.5, 0.6), "quantile", "c"),
        ((0.5, 0.7), "quantile", "cde"),
        ((0.0, 0.4), "quantile", "ab"),
    ],
)
def test_only_questions_in_the_range_are_drawn(limits: tuple[float, float], unit: str, expected: str):
    buffer = planted(buffer_of(difficulty_range=limits, difficulty_range_unit=unit), FIVE)
    assert everyone(buffer) == set(expected)
    assert buffer.num_drawable == len(expected)
    assert set(buffer.draw(9, np.random.default_rng(1), exclude={"c"})) == set(expected) - {"c"}
    assert buffer.num_drawable == len(expected)


@pytest.mark.parametrize("unit", ["rate", "quantile"])
@pytest.mark.parametrize(
    "difficulty", [{"difficulty": "window", "difficulty_window": 20}, {"difficulty": "reward_variance"}]
)
def test_a_range_is_exact_where_rates_are_finer_than_buckets(difficulty: dict[str, Any], unit: str):
    """Against the definition, written out, on random rewards; the limits fall within buckets."""
    buffer = buffer_of(difficulty_range=(0.3, 0.65), difficulty_range_unit=unit, **difficulty)
    rng, results, last = np.random.default_rng(0), {}, {}
    for step in range(12):
        for name in (f"q{i}" for i in range(40)):
            rewards = [float(rng.random() < int(name[1:]) / 40) for _ in range(K - 1)] + [round(float(rng.random()), 2)]
            rewards[0] = 0.0 if "difficulty_window" in difficulty else 0.2 * float(rng.random())
            rewards = rewards if min(rewards) <= 0 else [*rewards[:3], 0.0]
            results.setdefault(name, []).extend(reward > 0 for reward in rewards)
            last[name] = rewards
        buffer.record([group(name, rewards) for name, rewards in last.items()], step=step, collect=True)
    if "difficulty_window" in difficulty:
        rates = {name: np.mean(listed[-20:]) for name, listed in results.items()}
    else:
        away = {name: np.sqrt(max(0.25 - np.var(rewards), 0)) for name, rewards in last.items()}
        rates = {name: 0.5 + away[name] * (1 if np.mean(last[name]) >= 0.5 else -1) for name in last}
    rates = {name: float(rates[name]) for name, _ in buffer.questions()}
    ordered = sorted(rates.values())
    count = len(ordered)
    assert count == 40
    low, high = (0.3, 0.65) if unit == "rate" else (ordered[11], ordered[25])  # the 12th and 26th of 40
    expected = {name for name, rate in rates.items() if low - 1e-6 <= rate <= high + 1e-6}
    assert 3 < len(expected) < 37
    assert everyone(buffer) == expected


def test_within_the_range_the_law_is_that_of_the_buckets():
    """Of 20 new answers 5 to 15 right: in fourths .25 .3 .35 are in bucket 1, .45 in 2, .65 .7 .75 in 3, of normal
    weights exp(-1/2), 1, exp(-1/2); the first and the last are outside of the range."""
    buffer = buffer_of(difficulty="window", difficulty_window=20, difficulty_range=(0.3, 0.7))
    for name, right in {"low": 5, "a": 6, "b": 7, "c": 9, "d": 13, "e": 14, "high": 15}.items():
        for i in range(5):
            k = right // 5 + (i < right % 5)
            buffer.record([group(name, [1.0] * k + [0.0] * (K - k))], step=0, collect=True)
    side = np.exp(-0.5) / (1 + 2 * np.exp(-0.5))
    expected = {"a": side / 2, "b": side / 2, "c": 1 - 2 * side, "d": side / 2, "e": side / 2}
    assert_law(drawn_one_by_one(buffer), expected)


# entropy_percentile


def with_entropy(name: str, *answers: tuple[int, float]) -> Group:
    """Right answers (a token and its recorded -log-prob), and wrong ones."""
    members = [
        Trajectory(np.array([token], np.int32), np.array([-entropy], np.float32), 1.0, False, "stop", 0)
        for token, entropy in answers
    ]
    wrong = Trajectory(np.array([99], np.int32), np.array([-1.0], np.float32), 0.0, False, "stop", 0)
    return Group(Question(name, np.array([1], np.int32), ""), (*members, *[wrong] * (K - len(members))))


LOW = [
    with_entropy("a", (1, 0.5), (2, 0.25)),
    with_entropy("b", (1, 0.75)),
    with_entropy("c", (1, 0.125), (2, 2.0), (3, 0.25)),
    with_entropy("d", (1, 1.0)),
]


@pytest.mark.parametrize(
    ("percentile", "drawable", "candidates"),
    [(25, "c", [[0]]), (26, "ac", [[1], [0, 2]]), (50, "ac", [[1], [0, 2]]), (75, "abc", [[0, 1], [0], [0, 2]])],
)
def test_only_the_lowest_percent_of_questions_and_answers_take_part(
    percentile: float, drawable: str, candidates: list[list[int]]
):
    """The lowest of each: .25 .75 .125 1. At 25% the limit is .125, up to 50% .25, at 75% .75."""
    buffer = buffer_of(entropy_percentile=percentile)
    buffer.record(LOW, step=0, collect=True)
    assert everyone(buffer) == set(drawable)
    assert buffer.candidates(list(drawable)) == candidates
    assert buffer.num_drawable == len(drawable)


def test_the_limit_follows_what_is_evicted_retired_and_merged(tmp_path: Path):
    other = buffer_of()
    other.record([with_entropy("e", (1, 0.0625))], step=0, collect=True)
    other.save(tmp_path)
    buffer = buffer_of(entropy_percentile=50, max_answers=6)
    buffer.record(LOW, step=0, collect=True)  # the oldest of 7 goes: a's of .5
    assert everyone(buffer) == {"a", "c"}
    buffer.merge_file(tmp_path)  # and a's of .25: b c d e are left
    assert everyone(buffer) == {"c", "e"}
    buffer.record([group("c", [1.0] * K)], step=1, collect=True)
    assert everyone(buffer) == {"b", "e"}  # two of three at 50%


def test_the_entropy_limit_is_the_same_on_every_number_of_ranks_and_after_a_resume(tmp_path: Path):
    keys: dict[str, Any] = {"entropy_percentile": 30, "max_answers": 60, "difficulty": "window", "difficulty_window": 9,
            "difficulty_range": (0.1, 0.8), "difficulty_range_unit": "quantile", "difficulty_per_category": True,
            "categories": {f"q{i}": str(i % 3) for i in range(50)}}  # fmt: skip

    def work(comm: Communicator, folder: Path) -> Any:
        buffer = buffer_of(comm, folder / "store", **keys)
        seen = [play(buffer, seed=0, steps=6)]
        buffer.snapshot().save(folder / "checkpoint")
        seen += [play(buffer, seed=1, steps=3), replicated(buffer)]
        names = [name for name, _ in buffer.questions()]
        return [*seen, buffer.candidates(names), buffer._state.index.entropies[buffer.stats.rows(names)].tolist()]

    def again(comm: Communicator) -> Any:
        buffer = buffer_of(comm, tmp_path / "again", **keys)
        buffer.load(tmp_path / "one" / "checkpoint")
        return play(buffer, seed=1, steps=3), replicated(buffer)

    expected = work(SingleProcess(), tmp_path / "one")
    assert all(found == expected for found in on_ranks(2, 2, lambda comm: work(comm, tmp_path / "two")))
    assert all(found == (expected[1], expected[2]) for found in on_ranks(2, 1, again))


# difficulty_per_category

SCHOOL = {**{f"e{i}": "easy" for i in range(4)}, **{f"h{i}": "hard" for i in range(6)}}


def test_categories_take_part_by_their_questions_and_weights_go_by_rank():
    """Easy: two of bucket 2, two of 3: ranks .25 and .75, of 4 1 and 3: the normal weights are equal. Hard: four of
    bucket 1 and two of 2: ranks 1/3 and 5/6, of 4 4/3 and 10/3."""
    buckets = {"e0": 2, "e1": 2, "e2": 3, "e3": 3, **{f"h{i}": 1 for i in range(4)}, "h4": 2, "h5": 2}
    buffer = planted(buffer_of(difficulty_per_category=True, categories=SCHOOL), buckets)
    low, high = np.exp(-((4 / 3 - 2) ** 2) / 2), np.exp(-((10 / 3 - 2) ** 2) / 2)
    expected = {f"e{i}": 0.4 * 0.25 for i in range(4)}
    expected |= {f"h{i}": 0.6 * low / (low + high) / 4 for i in range(4)}
    expected |= {f"h{i}": 0.6 * high / (low + high) / 2 for i in (4, 5)}
    assert_law(drawn_one_by_one(buffer), expected)
    assert mean_ranks(np.array([0, 2, 2])).tolist() == [0, 0.25, 0.75]
    assert dict(buffer.questions()) == buckets
    assert everyone(buffer) == set(buckets)


def test_quantiles_are_those_of_the_category():
    """The easier half of each: from the median on, which is of bucket 2 among easy and of bucket 1 among hard ones."""
    buckets = {"e0": 2, "e1": 2, "e2": 2, "e3": 3, **{f"h{i}": 1 for i in range(3)}, "h3": 2, "h4": 2, "h5": 2}
    keys = {"difficulty_range": (0.6, 1.0), "difficulty_range_unit": "quantile", "bucket_weight": "uniform"}
    apart = planted(buffer_of(difficulty_per_category=True, categories=SCHOOL, **keys), buckets)
    assert everyone(apart) == {"e0", "e1", "e2", "e3", "h3", "h4", "h5"}
    together = planted(buffer_of(**keys), buckets)
    assert everyone(together) == everyone(apart)
    planted(apart, {"e0": 3, "e1": 3})
    planted(together, {"e0": 3, "e1": 3})
    assert everyone(apart) == {"e0", "e1", "e3", "h3", "h4", "h5"}
    assert everyone(together) == {"e0", "e1", "e2", "e3", "h3", "h4", "h5"}


def test_questions_of_other_categories_and_none_have_numbers():
    categories = Categories({"a": "x", "b": None, "c": "w"})
    assert [categories.number(name) for name in ("a", "b", "c", "nobody")] == [2, 0, 1, 0]
    with pytest.raises(ConfigError, match="with 40000 categories"):
        Categories({str(i): str(i) for i in range(40000)})


def test_a_run_goes_on_with_another_definition_where_the_checkpoint_has_what_it_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    buffer = buffer_of(difficulty="window", difficulty_window=8)
    planted(buffer, {"a": 3, "b": 1})
    buffer.record([group("a", [0.0] * K)], step=1, collect=True)
    buffer.snapshot().save(tmp_path)
    shorter = buffer_of(difficulty="window", difficulty_window=4)
    shorter.load(tmp_path)
    assert "1 questions are in another bucket now" in caplog.text
    assert dict(shorter.questions()) == {"a": 1, "b": 1}  # none of a's last four
    with_categories = buffer_of(difficulty_per_category=True, categories=SCHOOL)
    with_categories.load(tmp_path)
    assert dict(with_categories.questions()) == {"a": 2, "b": 1}


def test_memory_with_everything_on_is_at_most_a_hundred_bytes_a_question():
    keys = {"difficulty": "window", "difficulty_window": 128, "entropy_percentile": 25, "difficulty_per_category": True}
    config = ExperienceConfig.model_validate({"bucket_weight": "counts", **keys})
    categories = {str(i): str(i) for i in range(9)}
    buffer = ExperienceBuffer(config, K, SingleProcess(), pass_rate_decay=0.5, categories=categories)
    count = 8_000
    names = [f"question-{i:06d}" for i in range(count)]
    for name in names[: count // 2]:
        row = buffer._state.index.row(name)
        buffer._state.index.put(name, 1 + row % 3, 1)
        buffer.stats.reach(row)
    for name in names[count // 2 :]:
        buffer.stats.reach(buffer._state.index.row(name))
    assert 70 < buffer.index_nbytes / count <= 100


@pytest.mark.parametrize("distinct", [1, 3, 65, 100_000])
def test_what_stands_at_a_place_is_what_sorting_puts_there(distinct: int):
    rates = np.random.default_rng(0).integers(0, distinct, 500) / max(distinct - 1, 1)
    assert [at_place(rates, place) for place in range(0, 500, 7)] == np.sort(rates)[::7].tolist()
