"""Recording, retiring and drawing, by hand and against a naive implementation with dictionaries."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import BucketWeight, ExperienceConfig
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.types import Group, Question, Trajectory

K = 4


def buffer(group_size: int = K, **keys: Any) -> ExperienceBuffer:
    return ExperienceBuffer(
        ExperienceConfig.model_validate({"bucket_weight": "counts", **keys}), group_size, SingleProcess()
    )


def member(
    *tokens: int, reward: float = 1.0, replayed: bool = False, logprobs: list[float] | None = None
) -> Trajectory:
    values = [-0.5 * token for token in tokens] if logprobs is None else logprobs
    return Trajectory(
        np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32), reward, replayed, "stop", policy_version=7
    )


def group(name: str, *correct: Trajectory, size: int = K) -> Group:
    """The given members, filled up with wrong ones in front (a replayed member stays last)."""
    wrong = [member(90 + i, reward=0.0) for i in range(size - len(correct))]
    return Group(Question(name, np.array([1], dtype=np.int32), "42"), (*wrong, *correct))


def record(target: ExperienceBuffer, *groups: Group, step: int = 1, collect: bool = True) -> RecordReport:
    return target.record(list(groups), step=step, collect=collect)


def stored_tokens(target: ExperienceBuffer, name: str) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in target.answers(name)]


def test_a_partly_solved_question_is_stored_with_its_correct_answers_and_its_bucket():
    target = buffer()
    report = record(target, group("q", member(1, 2), member(3)), step=5)
    assert target.bucket_sizes() == {1: 0, 2: 1, 3: 0}
    assert (target.num_questions, target.num_answers, report.stored) == (1, 2, 2)
    first = target.answers("q")[0]
    assert first.token_ids.tolist() == [1, 2]
    assert first.logprobs.tolist() == [-0.5, -1.0]
    assert (first.policy_version, first.step) == (7, 5)


def test_the_latest_count_is_the_bucket():
    target = buffer()
    record(target, group("q", member(1), member(2), member(3)))
    record(target, group("q", member(1)))
    assert target.bucket_sizes() == {1: 1, 2: 0, 3: 0}


def test_a_question_without_a_correct_answer_changes_nothing():
    target = buffer()
    record(target, group("q", member(1), member(2)))
    report = record(target, group("q"), group("never"))
    assert report == RecordReport(unsolved=2)
    assert target.bucket_sizes()[2] == 1
    assert stored_tokens(target, "q") == [[1], [2]]
    assert target.answers("never") == ()


def test_a_solved_question_is_retired_and_forgotten():
    target = buffer()
    record(target, group("q", member(1)))
    report = record(target, group("q", *[member(i) for i in range(4)]))
    assert report == RecordReport(retired=["q"])
    assert target.is_retired("q")
    assert target.retired == {"q"}
    assert (target.num_questions, target.num_answers, target.answers("q")) == (0, 0, ())


def test_a_retired_question_never_comes_back():
    target = buffer()
    solved = group("q", *[member(i) for i in range(4)])
    record(target, solved)
    report = record(target, group("q", member(1)), solved)
    assert report == RecordReport(already_retired=2)
    assert target.num_questions == 0


def test_a_question_brought_back_is_as_one_that_was_never_tried():
    target = buffer()
    record(target, group("q", member(1), member(2)))
    record(target, group("q", *[member(i) for i in range(4)]), group("r", *[member(i) for i in range(4)]))
    target.bring_back(["q", "never"])
    assert (target.retired, target.num_retired, target.answers("q")) == ({"r"}, 1, ())
    report = record(target, group("q", member(1)))
    assert (report.already_retired, report.stored, stored_tokens(target, "q")) == (0, 1, [[1]])
    record(target, group("q", *[member(i) for i in range(4)]))
    assert (target.num_retired, target.num_questions) == (2, 0)


def test_retirement_does_not_wait_for_collection():
    target = buffer()
    report = record(target, group("q", *[member(i) for i in range(4)]), group("r", member(1)), collect=False)
    assert (report.retired, report.stored, report.not_collected) == (["q"], 0, 1)
    assert target.num_questions == 0


def test_without_collection_a_stored_question_still_changes_its_bucket():
    target = buffer()
    record(target, group("q", member(1)))
    record(target, group("q", member(5), member(6), member(7)), collect=False)
    assert target.bucket_sizes() == {1: 0, 2: 0, 3: 1}
    assert stored_tokens(target, "q") == [[1]]


def test_an_answer_stored_already_keeps_its_first_log_probs():
    target = buffer()
    record(target, group("q", member(1, 2)))
    report = record(target, group("q", member(1, 2, logprobs=[-9.0, -9.0]), member(1), member(1)))
    assert (report.stored, report.duplicates) == (1, 2)
    assert target.answers("q")[0].logprobs.tolist() == [-0.5, -1.0]
    assert stored_tokens(target, "q") == [[1, 2], [1]]


def test_a_replayed_answer_counts_in_k_and_is_not_stored_again():
    target = buffer()
    record(target, group("q", member(1)))
    report = record(target, group("q", member(2), member(8, replayed=True)))
    assert target.bucket_sizes()[2] == 1
    assert (report.stored, report.duplicates) == (1, 0)
    assert stored_tokens(target, "q") == [[1], [2]]


def test_a_question_solved_with_its_replayed_answer_is_retired():
    target = buffer()
    record(target, group("q", member(1)))
    record(target, group("q", member(2), member(3), member(4), member(1, replayed=True)))
    assert target.is_retired("q")


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-0.1], "it has 1 log-probs for 2 tokens"),
        ([-0.1, -0.1, -0.1], "it has 3 log-probs for 2 tokens"),
        ([-0.1, math.nan], "log-prob 1 of 2 is nan"),
        ([-math.inf, -0.1], "log-prob 0 of 2 is -inf"),
    ],
)
def test_an_answer_without_one_finite_log_prob_a_token_is_refused_and_named(logprobs: list[float], reason: str):
    target = buffer()
    report = record(target, group("q", member(1, 2, logprobs=logprobs)))
    assert [(answer.question_id, answer.reason) for answer in report.refused] == [("q", reason)]
    assert (report.stored, target.num_questions, target.num_answers) == (0, 0, 0)


def test_an_answer_without_tokens_is_refused():
    report = record(buffer(), group("q", member()))
    assert report.refused[0].reason == "it has no tokens"


def test_a_sound_answer_beside_a_refused_one_is_stored():
    target = buffer()
    report = record(target, group("q", member(1, logprobs=[math.nan]), member(2)))
    assert (len(report.refused), report.stored) == (1, 1)
    assert target.bucket_sizes()[2] == 1


def test_what_is_stored_is_a_copy_nobody_can_change():
    target = buffer()
    answer = member(1, 2)
    record(target, group("q", answer))
    answer.token_ids[0] = 99
    assert stored_tokens(target, "q") == [[1, 2]]
    with pytest.raises(ValueError, match="read-only"):
        target.answers("q")[0].logprobs[0] = 0.0


def test_two_groups_of_one_question_are_taken_in_order():
    target = buffer()
    record(target, group("q", member(1)), group("q", member(2), member(3)))
    assert target.bucket_sizes() == {1: 0, 2: 1, 3: 0}
    assert target.num_answers == 3


def test_a_disabled_buffer_stores_and_retires_nothing():
    target = buffer(enabled=False)
    assert record(target, group("q", member(1)), group("r", *[member(i) for i in range(4)])) == RecordReport()
    assert (target.num_questions, target.retired) == (0, frozenset())


def test_a_group_of_another_size_is_a_mistake():
    with pytest.raises(ValueError, match="a group of 3 members in a buffer for groups of 4"):
        record(buffer(), group("q", member(1), size=3))


def test_questions_that_are_no_longer_in_the_data_are_forgotten_and_counted():
    target = buffer()
    record(target, *[group(name, member(1), member(2)) for name in "abc"])
    assert target.keep_only({"b", "z"}) == 2
    assert (target.num_questions, target.num_answers, target.answers("a")) == (1, 2, ())


def bucketed(sizes: dict[int, int], **keys: Any) -> ExperienceBuffer:
    """A buffer for groups of 8 with that many questions in each bucket, named k-i."""
    target = buffer(8, **keys)
    for k, size in sizes.items():
        record(target, *[group(f"{k}-{i}", *[member(j) for j in range(k)], size=8) for i in range(size)])
    assert {k: size for k, size in target.bucket_sizes().items() if size} == sizes
    return target


def test_ten_of_23_questions_are_ten_distinct_ones():
    """As the released sampler does on {1: 1, 4: 2, 7: 20}."""
    target = bucketed({1: 1, 4: 2, 7: 20})
    for seed in range(50):
        drawn = target.draw(10, np.random.default_rng(seed))
        assert len(set(drawn)) == len(drawn) == 10
        assert {"4-0", "4-1"} <= set(drawn)


@pytest.mark.parametrize("n", [23, 24, 500])
def test_more_than_there_is_gives_all_there_is(n: int):
    target = bucketed({1: 1, 4: 2, 7: 20})
    assert len(set(target.draw(n, np.random.default_rng(0)))) == 23


def test_an_empty_buffer_gives_nothing():
    assert buffer().draw(5, np.random.default_rng(0)) == []
    assert bucketed({4: 1}).draw(0, np.random.default_rng(0)) == []


def test_excluded_questions_are_never_drawn():
    target = bucketed({3: 4, 4: 4})
    exclude = {"3-0", "3-3", "4-1", "unknown"}
    for seed in range(200):
        drawn = target.draw(5, np.random.default_rng(seed), exclude)
        assert sorted(drawn) == ["3-1", "3-2", "4-0", "4-2", "4-3"]


def test_the_same_generator_gives_the_same_draw_whatever_the_order_of_the_excluded():
    target = bucketed({2: 9, 4: 9, 6: 9})
    draws = [target.draw(6, np.random.default_rng(3), order) for order in (["4-0", "4-5"], ["4-5", "4-0"])]
    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("kind", "probability"), [("counts", 0.39905), ("accuracy", 0.14734), ("linear", 4 / 28), ("uniform", 1 / 7)]
)
def test_buckets_are_drawn_by_their_weight_and_questions_in_them_alike(kind: BucketWeight, probability: float):
    """10,000 draws of one question; every frequency within four standard errors of the table."""
    target = bucketed(dict.fromkeys(range(1, 8), 2), bucket_weight=kind)
    rng = np.random.default_rng(11)
    draws = 10_000
    seen = Counter(target.draw(1, rng)[0] for _ in range(draws))
    for name in ("4-0", "4-1"):
        expected = probability / 2
        assert abs(seen[name] / draws - expected) <= 4 * (expected * (1 - expected) / draws) ** 0.5


def test_every_bucket_weight_changes_what_is_drawn():
    drawn = {
        kind: tuple(bucketed(dict.fromkeys(range(1, 8), 30), bucket_weight=kind).draw(60, np.random.default_rng(0)))
        for kind in get_args(BucketWeight)
    }
    assert len(set(drawn.values())) == 6


class Naive:
    """The rules of Algorithm 1 with plain dictionaries."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[tuple[int, ...], list[float]]] = {}
        self.buckets: dict[str, int] = {}
        self.retired: set[str] = set()

    def record(self, groups: list[Group], collect: bool) -> None:
        for name, members in ((g.question.id, g.trajectories) for g in groups):
            correct = [m for m in members if m.reward > 0]
            if name in self.retired or not correct:
                continue
            if len(correct) == K:
                self.retired.add(name)
                self.answers.pop(name, None)
                self.buckets.pop(name, None)
                continue
            for m in correct:
                sound = len(m.logprobs) == len(m.token_ids) > 0 and all(map(math.isfinite, m.logprobs))
                if collect and sound and not m.replayed:
                    self.answers.setdefault(name, {}).setdefault(tuple(m.token_ids.tolist()), m.logprobs.tolist())
            if name in self.answers:
                self.buckets[name] = len(correct)


def random_group(rng: np.random.Generator) -> Group:
    members = []
    for i in range(K):
        tokens = rng.integers(0, 3, int(rng.integers(0, 4))).tolist()
        logprobs = [float(-value) for value in rng.integers(0, 5, len(tokens))]
        if rng.random() < 0.1:
            logprobs = [*logprobs, math.nan][-max(1, len(tokens)) :]
        replayed = i == K - 1 and rng.random() < 0.3
        members.append(member(*tokens, reward=float(rng.random() < 0.6), replayed=replayed, logprobs=logprobs))
    return Group(Question(f"q{rng.integers(40)}", np.array([1], dtype=np.int32), "42"), tuple(members))


@pytest.mark.parametrize("seed", range(15))
def test_random_histories_agree_with_plain_dictionaries(seed: int):
    rng = np.random.default_rng(seed)
    target, naive = buffer(), Naive()
    for step in range(40):
        groups = [random_group(rng) for _ in range(5)]
        collect = bool(rng.random() < 0.8)
        record(target, *groups, step=step, collect=collect)
        naive.record(groups, collect)

        names = set(naive.buckets)
        assert target.retired == naive.retired
        assert target.num_questions == len(names)
        assert target.num_answers == sum(map(len, naive.answers.values()))
        counts = Counter(naive.buckets.values())
        assert target.bucket_sizes() == {k: counts[k] for k in range(1, K)}
        for name in names:
            got = {tuple(a.token_ids.tolist()): a.logprobs.tolist() for a in target.answers(name)}
            assert got == naive.answers[name]

        exclude = {f"q{i}" for i in rng.integers(0, 40, 6)}
        n = int(rng.integers(0, 20))
        drawn = target.draw(n, rng, exclude)
        assert len(set(drawn)) == len(drawn) == min(n, len(names - exclude))
        assert set(drawn) <= names - exclude


def test_a_draw_from_thirty_thousand_questions_takes_under_five_milliseconds():
    """The goal, an order of magnitude above what benchmarks/experience_draw.py measures."""
    target = buffer()
    record(target, *[group(f"q{i}", *[member(j) for j in range(1 + i % 3)]) for i in range(30_000)])
    rng, times = np.random.default_rng(0), []
    for _ in range(25):
        start = time.perf_counter()
        drawn = target.draw(64, rng, exclude={"q5", "q6"})
        times.append(time.perf_counter() - start)
        assert len(drawn) == 64
    assert np.median(times) < 0.005
