"""The order of fresh questions: no repeats, no waste, exact resume."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from exgrpo_megatron.data.order import QuestionOrder, permutation
from exgrpo_megatron.errors import CheckpointError, DataError
from exgrpo_megatron.types import Question


def questions(n: int) -> list[Question]:
    return [Question(f"q{index}", np.asarray([index], np.int32), str(index)) for index in range(n)]


def ids(taken: list[Question]) -> list[str]:
    return [question.id for question in taken]


def order(n: int, seed: int = 0, epoch_order: str = "reshuffle") -> QuestionOrder:
    return QuestionOrder(questions(n), seed, epoch_order)


def test_the_order_is_that_of_sorted_raw_pcg64_bits():
    # Independent: 64-bit outputs of numpy's legacy-stable bit generator, ranked by Python's sort.
    raw = [int(np.random.PCG64(np.random.SeedSequence([7, 3])).random_raw(6)[index]) for index in range(6)]
    assert permutation(6, 7, 3).tolist() == sorted(range(6), key=raw.__getitem__)


def test_the_first_orders_of_seed_0_never_change():
    assert [permutation(5, 0, epoch).tolist() for epoch in (0, 1)] == [[3, 2, 1, 0, 4], [4, 1, 2, 0, 3]]


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 23])
@pytest.mark.parametrize("epoch_order", ["reshuffle", "same"])
def test_without_exclusions_every_question_comes_once_an_epoch(batch, epoch_order):
    line = order(23, epoch_order=epoch_order)
    # 23 calls use up `batch` epochs, and nothing waits at the end.
    served = Counter(name for _ in range(23) for name in ids(line.take(batch)))
    assert served == {f"q{index}": batch for index in range(23)}
    assert (line.epoch, line.state_dict()["line"]) == (batch - 1, [])


def test_reshuffle_changes_the_order_of_the_second_epoch_and_same_does_not():
    for epoch_order, equal in (("reshuffle", False), ("same", True)):
        line = order(30, epoch_order=epoch_order)
        assert (ids(line.take(30)) == ids(line.take(30))) is equal
        assert line.epoch == 1


def test_excluded_questions_stay_first_in_line():
    line = order(10)
    straight = ids(order(10).take(10))
    assert ids(line.take(3, exclude={straight[0], straight[2]})) == [straight[1], straight[3], straight[4]]
    assert ids(line.take(4)) == [straight[0], straight[2], straight[5], straight[6]]


def test_a_call_across_an_epoch_border_has_no_question_twice():
    line = order(5)
    line.take(3)
    taken = ids(line.take(5))
    assert sorted(taken) == ["q0", "q1", "q2", "q3", "q4"]
    # The two that ended epoch 0 were met again in epoch 1; they wait, and nothing of epoch 1 is lost.
    assert sorted(ids(line.take(2))) == sorted(taken[:2])
    assert line.epoch == 1


def test_random_exclusions_throw_nothing_away():
    rng = random.Random(5)
    line, served = order(40), Counter()
    for _ in range(200):
        exclude = {f"q{index}" for index in rng.sample(range(40), 9)}
        batch = ids(line.take(rng.randrange(1, 25), exclude))
        assert len(set(batch)) == len(batch)
        assert not exclude & set(batch)
        served.update(batch)
    waiting = Counter(line.state_dict()["line"])
    # Every question has been put in line once an epoch, and is either served or still waiting.
    assert all(served[f"q{index}"] + waiting[f"q{index}"] == line.epoch + 1 for index in range(40))


@pytest.mark.parametrize("stop_at", range(0, 12))
def test_a_resume_at_any_point_continues_identically(stop_at):
    def run(line: QuestionOrder, steps: range) -> list[list[str]]:
        batches = []
        for step in steps:
            batches.append(ids(line.take(4, exclude={f"q{step % 11}", f"q{(3 * step) % 11}"})))
            line.discard(step % 2)
            line.remove([f"q{step}"], min_remaining=7)
        return batches

    straight = run(order(11, seed=9), range(12))
    first = order(11, seed=9)
    begun = run(first, range(stop_at))
    resumed = order(11, seed=9)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + run(resumed, range(stop_at, 12)) == straight


def test_discarded_questions_are_gone_for_their_epoch_only():
    line = order(10)
    straight = ids(order(10).take(10))
    assert line.discard(4) == 4
    assert ids(line.take(6)) == straight[4:]
    assert sorted(ids(line.take(10))) == sorted(straight)


def test_discarding_ends_with_the_epoch():
    line = order(5)
    line.take(3)
    assert line.discard(4) == 2
    assert len(line.take(5)) == 5


def test_removed_questions_stay_in_this_epoch_and_leave_the_next():
    line = order(6)
    assert line.remove(["q1", "q4", "of another set"], min_remaining=2) == []
    assert line.num_active == 4
    assert sorted(ids(line.take(6))) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert sorted(ids(line.take(4))) == ["q0", "q2", "q3", "q5"]


def test_removal_stops_while_more_than_the_minimum_remain():
    # 30 questions, batches of 4: more than 4 + 20 must remain, so 25 stay.
    line = order(30)
    stayed = line.remove({f"q{index}" for index in range(8)}, min_remaining=24)
    assert stayed == ["q5", "q6", "q7"]
    assert line.num_active == 25


def test_too_few_questions_quotes_the_numbers_and_changes_nothing():
    line = order(6)
    line.remove(["q0"], min_remaining=1)
    line.take(6)
    before = line.state_dict()
    with pytest.raises(DataError, match=r"needs 5 different.*has only 4: 6 questions, 1 of them retired, 1 .*replayed"):
        line.take(5, exclude={"q3"})
    assert line.state_dict() == before


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (order(6, seed=1), r"grpo\.seed = 0, this run 1"),
        (order(6, epoch_order="same"), r"data\.epoch_order = 'reshuffle', this run 'same'"),
        (order(7), "number of questions = 6, this run 7"),
        (QuestionOrder([*questions(5), Question("new", np.zeros(1, np.int32), "1")], 0, "reshuffle"), "first: 'q5'"),
    ],
)
def test_the_state_of_another_order_is_refused(other, named):
    with pytest.raises(CheckpointError, match=named):
        other.load_state_dict(order(6).state_dict())


def test_questions_brought_back_join_what_is_left_of_the_epoch_and_every_later_one():
    line = order(30)
    gone = ids(line.take(10))
    waiting = line.state_dict()["line"][:2]
    line.remove([*gone[:6], *waiting], 1)
    assert line.num_active == 22
    # Two that never left the line stand in it once; q99 is of another set, gone[9] was never left out.
    assert line.bring_back([*gone[:3], *waiting, "q99", gone[9]], np.random.default_rng(0)) == 5
    assert line.num_active == 27
    rest = line.state_dict()["line"]
    assert sorted(rest) == sorted([*ids(order(30).take(30))[10:], *gone[:3]])
    assert [name for name in rest if name not in gone] == ids(order(30).take(30))[10:]
    line.take(23)
    assert sorted(ids(line.take(27))) == sorted(set(ids(order(30).take(30))) - set(gone[3:6]))


def test_places_of_questions_brought_back_are_uniform_over_the_line():
    places: Counter[int] = Counter()
    for seed in range(600):
        line = order(6)
        back = ids(line.take(2))[0]
        line.remove([back], 1)
        line.bring_back([back], np.random.default_rng(seed))
        places[line.state_dict()["line"].index(back)] += 1
    # 120 expected at each of the 5 places, with a deviation of sqrt(600 x .2 x .8) = 9.8.
    assert set(places) == set(range(5))
    assert all(abs(count - 120) < 35 for count in places.values())


def test_the_next_epoch_begins_with_the_question_after_the_last_of_this_one():
    line = order(6)
    assert line.next_epoch == 0
    line.take(4)
    assert line.next_epoch == 0
    line.take(2)
    assert (line.epoch, line.next_epoch) == (0, 1)
    line.take(1)
    assert (line.epoch, line.next_epoch) == (1, 1)
