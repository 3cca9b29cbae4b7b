"""The buffer of a loop of one's own: what goes in, what comes out, and why."""

from collections import Counter

import numpy as np
import pytest
import torch

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.replay import DifficultyBucketer, TrajectoryBuffer
from exgrpo_megatron.types import Group, Question, ScoredSequence, Trajectory


def trajectory(question, reward=1.0, entropy=1.0, tokens=(1, 2), **more):
    """Of so many tokens, each with the log-prob -entropy."""
    return {
        "question_id": question,
        "token_ids": list(tokens),
        "logprobs": [-entropy] * len(tokens),
        "reward": reward,
        **more,
    }


def attempts(question, right, wrong, entropy=1.0):
    """Right answers, each of its own tokens, and wrong ones."""
    return [
        *(trajectory(question, 1.0, entropy, (7, place)) for place in range(right)),
        *(trajectory(question, 0.0) for _ in range(wrong)),
    ]


def names(sampled):
    return sorted(one.question_id for one in sampled)


def five(**options):
    """Questions with 1, 3, 5, 7 and 9 right of ten, each of its own entropy: .5, .4, .3, .2, .1."""
    buffer = TrajectoryBuffer(**options)
    for right in (1, 3, 5, 7, 9):
        buffer.add(attempts(f"q{right}", right, 10 - right, entropy=(10 - right) // 2 / 10 + 0.1))
    return buffer


def test_correct_answers_are_stored_and_wrong_ones_counted():
    buffer = TrajectoryBuffer()
    report = buffer.add([trajectory("a"), trajectory("a", tokens=(3,)), trajectory("a", 0.0), trajectory("b", -1.0)])
    assert (report.stored, report.wrong, report.duplicates, report.evicted) == (2, 2, 0, 0)
    assert (len(buffer), buffer.num_questions) == (2, 1)
    assert buffer.difficulty.rate("a") == pytest.approx(2 / 3)
    assert (buffer.difficulty.rate("b"), buffer.difficulty.num_attempts("b")) == (0.0, 1)


def test_an_answer_comes_out_as_it_went_in():
    buffer = TrajectoryBuffer()
    buffer.add(trajectory("a", 0.0))
    buffer.add(trajectory("a", tokens=(5, 6, 7), entropy=0.75, prompt_ids=[3, 1], policy_version=4))
    (one,) = buffer.sample(size=3)
    assert (one.question_id, one.prompt_ids.tolist(), one.token_ids.tolist()) == ("a", [3, 1], [5, 6, 7])
    assert one.logprobs.tolist() == [-0.75] * 3
    assert (one.policy_version, one.step, one.correctness_rate, one.entropy) == (4, 2, 0.5, 0.75)


def test_what_was_replayed_is_no_new_attempt():
    buffer = TrajectoryBuffer()
    buffer.add(attempts("a", 1, 1))
    (one,) = buffer.sample(size=1)
    report = buffer.add({**one.as_dict(), "reward": 1.0})
    assert (report.replayed, report.stored, len(buffer)) == (1, 0, 1)
    assert buffer.difficulty.num_attempts("a") == 2


def test_the_same_tokens_are_stored_once():
    buffer = TrajectoryBuffer()
    buffer.add(trajectory("a", entropy=1.0))
    report = buffer.add([trajectory("a", entropy=2.0), trajectory("b")])
    assert (report.stored, report.duplicates) == (1, 1)
    assert {one.entropy for one in buffer.sample("uniform", size=2)} == {1.0}


def test_lists_arrays_tensors_and_our_groups_are_taken_alike():
    rows = [-0.5, -0.25]
    buffer = TrajectoryBuffer()
    for name, ids, logprobs in (
        ("list", [1, 2], rows),
        ("array", np.array([1, 2]), np.array(rows)),
        ("tensor", torch.tensor([1, 2]), torch.tensor(rows, dtype=torch.bfloat16, requires_grad=True)),
    ):
        buffer.add({"question_id": name, "token_ids": ids, "logprobs": logprobs, "reward": 1})
    member = Trajectory(np.array([1, 2], np.int32), np.array(rows, np.float32), 1.0, False, "stop", 0)
    buffer.add(Group(Question("group", np.array([9], np.int32), answer="42"), (member,)))
    sampled = {one.question_id: one for one in buffer.sample("uniform", size=10)}
    assert len(sampled) == 4
    assert all(one.token_ids.tolist() == [1, 2] and one.logprobs.tolist() == rows for one in sampled.values())
    assert sampled["group"].prompt_ids.tolist() == [9]
    assert sampled["list"].prompt_ids is None


def test_max_size_bounds_the_answers_and_the_oldest_go():
    buffer = TrajectoryBuffer(max_size=3)
    reports = [buffer.add(trajectory(f"q{n}")) for n in range(5)]
    assert [report.evicted for report in reports] == [0, 0, 0, 1, 1]
    assert len(buffer) == 3
    assert names(buffer.sample("uniform", size=9)) == ["q2", "q3", "q4"]


def test_eviction_by_entropy_and_by_use():
    by_entropy = TrajectoryBuffer(max_size=2, eviction="highest_entropy")
    by_entropy.add([trajectory("a", entropy=0.2), trajectory("b", entropy=0.9), trajectory("c", entropy=0.5)])
    assert names(by_entropy.sample("uniform", size=9)) == ["a", "c"]
    by_use = TrajectoryBuffer(max_size=2, eviction="least_recently_replayed")
    by_use.add([trajectory("a"), trajectory("b")])
    by_use.add(trajectory("a", 0.0))
    by_use.sample("uniform", size=1, exclude={"b"})
    by_use.add(trajectory("c"))
    assert names(by_use.sample("uniform", size=9)) == ["a", "c"]


def test_max_per_question_bounds_a_question():
    buffer = TrajectoryBuffer(max_per_question=2)
    report = buffer.add([*attempts("a", 5, 0), trajectory("b")])
    assert (report.evicted, len(buffer)) == (3, 3)


def test_questions_are_put_in_as_many_tiers_as_asked_for():
    # Rates .1, .3, .5, .7, .9; borders of five tiers at 1/4, 5/12, 7/12, 3/4, of two at 1/2 (in the upper one).
    assert five().tier_sizes() == [1, 1, 1, 1, 1]
    assert five(difficulty_tiers=2).tier_sizes() == [2, 3]
    assert five(difficulty_tiers=1).tier_sizes() == [5]


def test_a_question_moves_with_its_rate():
    buffer = TrajectoryBuffer(bucketer=DifficultyBucketer(window_size=4))
    buffer.add(attempts("a", 1, 3))
    assert buffer.tier_sizes() == [0, 1, 0, 0, 0]
    buffer.add(attempts("a", 4, 0))
    assert buffer.tier_sizes() == [0, 0, 0, 0, 1]
    buffer.add(attempts("a", 0, 4))
    assert buffer.tier_sizes() == [1, 0, 0, 0, 0]


def test_the_metric_decides_the_rate(tmp_path):
    # Rewards .5 and .9: both right; their variance .04 is that of a rate of .958.
    by_share, by_variance = TrajectoryBuffer(), TrajectoryBuffer(bucketer=DifficultyBucketer("reward_variance"))
    for buffer in (by_share, by_variance):
        buffer.add([trajectory("a", 0.5, tokens=(1,)), trajectory("a", 0.9, tokens=(2,))])
    assert by_share.sample("uniform", size=1)[0].correctness_rate == 1.0
    by_variance.save(tmp_path / "saved")
    for buffer in (by_variance, TrajectoryBuffer.load(tmp_path / "saved")):
        assert buffer.sample("uniform", size=1)[0].correctness_rate == pytest.approx(0.958258, abs=1e-5)
        assert len(buffer.sample("medium_difficulty", size=1, difficulty_range=(0.9, 0.96))) == 1


def test_middle_tiers_are_drawn_first():
    # Normal of width 1 around tier 3 of 5: weights .054, .242, .399, .242, .054, renormalised by their sum .991.
    buffer = five(seed=1)
    drawn = Counter(
        buffer.sample("medium_difficulty", size=1, difficulty_range=(0.0, 1.0))[0].question_id for _ in range(600)
    )
    expected = {"q1": 0.05449, "q3": 0.24420, "q5": 0.40262, "q7": 0.24420, "q9": 0.05449}
    # Standard error of a share at most .02.
    assert all(abs(drawn[name] / 600 - share) < 0.08 for name, share in expected.items())


def test_the_difficulty_range_holds_both_ends_included():
    buffer = five()
    assert names(buffer.sample("medium_difficulty", size=9)) == ["q3", "q5", "q7"]
    assert names(buffer.sample("medium_difficulty", size=9, difficulty_range=(0.5, 0.9))) == ["q5", "q7", "q9"]
    assert names(buffer.sample("medium_difficulty", size=9, difficulty_range=(0.31, 0.49))) == []


def test_the_entropy_percentile_holds():
    # Entropies .5 .4 .3 .2 .1: 25% of five are the two lowest (rounded up), 50% three, 75% four.
    buffer = five()
    assert buffer.entropy_thresholds() == pytest.approx({25: 0.2, 50: 0.3, 75: 0.4})
    assert names(buffer.sample("low_entropy", size=9)) == ["q7", "q9"]
    assert names(buffer.sample("low_entropy", size=9, entropy_percentile=75)) == ["q3", "q5", "q7", "q9"]
    assert names(buffer.sample(size=9, entropy_percentile=50)) == ["q5", "q7"]


def test_only_the_percentiles_asked_for_at_first_are_known():
    buffer = five(entropy_percentiles=[90, 20])
    assert buffer.entropy_thresholds() == pytest.approx({20: 0.1, 90: 0.5})
    assert names(buffer.sample("low_entropy", size=9)) == ["q9"]
    with pytest.raises(
        ValueError, match=r"entropy_percentile = 25: must be one of entropy_percentiles = \[20.0, 90.0\]"
    ):
        buffer.sample(size=1, entropy_percentile=25)
    with pytest.raises(ValueError, match="entropy_percentiles is empty"):
        five(entropy_percentiles=[]).sample(size=1)
    assert names(five(entropy_percentiles=[]).sample("medium_difficulty", size=9)) == ["q3", "q5", "q7"]


def test_of_a_question_the_answer_of_lowest_entropy_is_taken():
    buffer = TrajectoryBuffer()
    answers = [trajectory("a", 1.0, entropy, (place,)) for place, entropy in enumerate((0.5, 0.2, 0.9))]
    buffer.add([*answers, *attempts("a", 0, 3)])
    assert [buffer.sample(size=1)[0].entropy for _ in range(5)] == pytest.approx([0.2] * 5)
    drawn = {buffer.sample("medium_difficulty", size=1)[0].token_ids[0] for _ in range(60)}
    assert drawn == {0, 1, 2}


def test_with_a_score_the_policy_of_now_decides_among_those_within_the_percentile():
    buffer = TrajectoryBuffer(entropy_percentiles=[50])
    # Of two questions 50% is the first: its lowest entropy, .2, is the limit; .9 is beyond it.
    buffer.add([trajectory("a", 1.0, entropy, (place,)) for place, entropy in enumerate((0.1, 0.2, 0.9))])
    buffer.add([*attempts("a", 0, 3), trajectory("b", entropy=0.2), trajectory("b", 0.0)])
    asked = []

    def score(candidates):
        asked.extend((one.question_id, one.token_ids.tolist()) for one in candidates)
        return [ScoredSequence(one.logprobs, np.array([1.0 / (1 + one.token_ids[0])])) for one in candidates]

    buffer.add(trajectory("c", entropy=0.2))
    (one,) = buffer.sample(size=1, exclude={"b"}, score=score)
    assert asked == [("a", [0]), ("a", [1])]
    assert one.token_ids.tolist() == [1]


def test_size_is_a_number_of_different_questions():
    buffer = five()
    assert len(buffer.sample("uniform", size=3)) == 3
    assert names(buffer.sample("uniform", size=99)) == ["q1", "q3", "q5", "q7", "q9"]
    assert names(buffer.sample("uniform", size=99, exclude={"q1", "q9"})) == ["q3", "q5", "q7"]
    assert TrajectoryBuffer().sample(size=4) == []


def test_the_seed_decides_the_draws():
    def drawn(seed):
        buffer = five(seed=seed)
        return [one.question_id for _ in range(10) for one in buffer.sample("uniform", size=2)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_clear_forgets_answers_questions_and_prompts():
    buffer = five()
    buffer.clear()
    assert (len(buffer), buffer.num_questions, buffer.tier_sizes()) == (0, 0, [0] * 5)
    assert np.isnan(buffer.difficulty.rate("q5"))
    buffer.add(trajectory("q5", prompt_ids=[8]))
    assert len(buffer) == 1


def test_a_saved_buffer_goes_on_alike(tmp_path):
    buffer = five(max_size=40, difficulty_tiers=3, entropy_percentiles=[30], seed=5,
                  bucketer=DifficultyBucketer(window_size=7))  # fmt: skip
    buffer.add(trajectory("p", prompt_ids=[4, 4], entropy=0.1))
    buffer.sample("uniform", size=2)
    buffer.save(tmp_path / "saved")
    again = TrajectoryBuffer.load(tmp_path / "saved", store=tmp_path / "store")
    assert (len(again), again.tier_sizes()) == (len(buffer), buffer.tier_sizes())
    assert (again.difficulty.window_size, again.difficulty.rate("q3")) == (7, buffer.difficulty.rate("q3"))
    for _ in range(5):
        one, other = buffer.sample("low_entropy", size=2), again.sample("low_entropy", size=2)
        assert [x.question_id for x in one] == [x.question_id for x in other]
        assert [x.logprobs.tolist() for x in one] == [x.logprobs.tolist() for x in other]
    prompts = {one.question_id: one.prompt_ids for one in again.sample("uniform", size=9)}
    assert prompts["p"].tolist() == [4, 4]
    assert [b.add(trajectory("new")).stored for b in (buffer, again)] == [1, 1]
    assert max(one.step for one in again.sample("uniform", size=9)) == 7
    again.close()
    assert not list((tmp_path / "store").rglob("*.seg"))


def test_what_is_no_saved_buffer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"buffer.json: not found"):
        TrajectoryBuffer.load(tmp_path)
    TrajectoryBuffer().save(tmp_path / "saved")
    with pytest.raises(FileExistsError, match="not empty"):
        TrajectoryBuffer().save(tmp_path / "saved")
    (tmp_path / "saved" / "buffer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"buffer.json: cannot be read"):
        TrajectoryBuffer.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-1.0, float("nan")]}, r"trajectory 1 \(question 'q'\): log-prob 1 of 2 is nan"),
        ({"logprobs": [-1.0, None]}, "log-prob 1 of 2 is nan"),
        ({"logprobs": [-1.0]}, "it has 1 log-probs for 2 tokens"),
        ({"logprobs": None}, "logprobs must be one row of numbers"),
        ({"logprobs": ...}, "logprobs is missing"),
        ({"token_ids": []}, "it has no tokens"),
        ({"token_ids": [1, 2.5]}, "token_ids must be whole numbers"),
        ({"token_ids": [1, -2]}, "token_ids must be from 0"),
        ({"token_ids": [[1, 2]]}, r"token_ids must be one row of numbers, found shape \[1, 2\]"),
        ({"reward": float("inf")}, "reward = inf must be a finite number"),
        ({"reward": "1"}, "reward = '1' must be a finite number"),
        ({"policy_version": 1.5}, "policy_version = 1.5 must be a whole number"),
        ({"question_id": 7}, "question_id = 7 must be a text"),
        ({"log_probs": [1.0]}, "unknown key 'log_probs'; its keys are question_id, token_ids, logprobs, reward"),
        ({"prompt_ids": [1, 3]}, "prompt_ids differ from those of the same question before"),
    ],
)
def test_a_faulty_trajectory_is_refused_by_name_and_nothing_is_taken_in(change, message):
    buffer = TrajectoryBuffer()
    faulty = {**trajectory("q", prompt_ids=[1, 2]), **change}
    faulty = {name: value for name, value in faulty.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        buffer.add([trajectory("q", tokens=(9,), prompt_ids=[1, 2]), faulty])
    assert (len(buffer), buffer.difficulty.num_attempts("q")) == (0, 0)


def test_another_prompt_of_a_known_question_is_refused():
    buffer = TrajectoryBuffer()
    buffer.add(trajectory("q", prompt_ids=[1]))
    with pytest.raises(ValueError, match="'q': prompt_ids differ from those it was added with before"):
        buffer.add(trajectory("q", tokens=(3,), prompt_ids=[2]))
    with pytest.raises(ValueError, match="trajectory 0 is a int"):
        buffer.add([3])


@pytest.mark.parametrize(
    "options",
    [
        {"max_size": 0}, {"difficulty_tiers": 0}, {"difficulty_tiers": 1001}, {"entropy_percentiles": [0, 50]},
        {"entropy_percentiles": [50, 50]}, {"max_per_question": 0}, {"eviction": "newest"},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TrajectoryBuffer(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "hardest"}, {"size": 0}, {"difficulty_range": (0.7, 0.3)}, {"difficulty_range": (0.5, 1.5)},
        {"strategy": "uniform", "difficulty_range": (0.3, 0.7)},
        {"strategy": "low_entropy", "difficulty_range": (0.3, 0.7)},
        {"strategy": "uniform", "entropy_percentile": 25}, {"strategy": "medium_difficulty", "entropy_percentile": 25},
        {"strategy": "uniform", "score": lambda _: []},
    ],
)  # fmt: skip
def test_a_sample_that_makes_no_sense_is_refused_by_name(options):
    with pytest.raises(ValueError, match=list(options)[-1]):
        five().sample(**{"size": 2, **options})


@pytest.mark.parametrize(
    "change", [{"policy_version": 2**63}, {"question_id": "\ud800"}, {"question_id": "x" * 2**16}], ids=list("abc")
)
def test_what_no_record_can_hold_is_refused_before_anything_is_taken_in(change):
    buffer = TrajectoryBuffer()
    good = {"question_id": "q", "token_ids": [1], "logprobs": [-1.0], "reward": 1.0}
    with pytest.raises(ValueError, match="trajectory 1"):
        buffer.add([good, {**good, **change}])
    assert len(buffer) == 0


def test_a_saved_buffer_with_settings_changed_by_hand_is_refused(tmp_path):
    TrajectoryBuffer().save(tmp_path / "saved")
    path = tmp_path / "saved" / "buffer.json"
    path.write_text(path.read_text().replace('"max_size"', '"most"'))
    with pytest.raises(CheckpointError, match="its settings are none of a buffer"):
        TrajectoryBuffer.load(tmp_path / "saved")
