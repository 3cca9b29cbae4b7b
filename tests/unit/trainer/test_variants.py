"""Every switch of `config.VARIANTS` and every key of `experience:` changes what it says, through `Trainer.step`.

Keys of the loss and of advantages are in test_objective_keys.py. Unless a test says otherwise: B = 4 questions, K = 4
answers, replay on from the first step at rho = 0.5, and with seed 10 twelve questions stand in line as
6 4 2 12 | 9 5 7 11 | 3 8 1 10.
"""

import numpy as np
import pytest
from scripted import all_wrong, build_trainer, fresh_ids, half_right, plant, replayed_members, right, token_ids, wrong

LINE = ["q6", "q4", "q2", "q12", "q9", "q5", "q7", "q11", "q3", "q8", "q1", "q10"]


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer whose engine follows a script."""

    def build(script=all_wrong, **sections):
        return build_trainer(tmp_path, script, comm=data_parallel, **sections)

    return build


# experience.bucket_weight, bucket_sigma

# Questions in buckets 1..7 of K = 8; a draw of two never finds a bucket too small.
SIZES = (3, 4, 5, 6, 7, 8, 9)
COUNTS = [0.00443, 0.05401, 0.24204, 0.39905, 0.24204, 0.05401, 0.00443]
ACCURACY = [0.13733, 0.14281, 0.14619, 0.14734, 0.14619, 0.14281, 0.13733]


@pytest.mark.parametrize(
    ("weight", "sigma", "expected"),
    [
        # The two tables published for K = 8.
        ("counts", 1.0, COUNTS),
        ("accuracy", 1.0, ACCURACY),
        # One count is 1/8 in accuracy.
        ("accuracy", 0.125, COUNTS),
        # exp(-2) = .13534 and exp(-8) = .00034 to either side of 1, over their sum 1.27134.
        ("counts", 0.5, [0, 0.00026, 0.10645, 0.78657, 0.10645, 0.00026, 0]),
        # k / 28; root(k) / 13.4776; 1 2 3 4 4 4 4 over 22; sizes over 42.
        ("linear", 1.0, [0.03571, 0.07143, 0.10714, 0.14286, 0.17857, 0.21429, 0.25]),
        ("sqrt", 1.0, [0.07420, 0.10493, 0.12851, 0.14839, 0.16591, 0.18175, 0.19631]),
        ("linear_clip", 1.0, [0.04545, 0.09091, 0.13636, 0.18182, 0.18182, 0.18182, 0.18182]),
        ("uniform", 1.0, [0.07143, 0.09524, 0.11905, 0.14286, 0.16667, 0.19048, 0.21429]),
    ],
)
def test_questions_are_drawn_from_buckets_by_the_weight_named(make, weight, sigma, expected):
    trainer = make(
        num_questions=sum(SIZES),
        grpo={"num_generations_per_prompt": 8},
        policy={"train_global_batch_size": 32},
        experience={"bucket_weight": weight, "bucket_sigma": sigma},
    )
    names = iter(trainer.questions)
    bucket_of = {}
    for k, size in enumerate(SIZES, start=1):
        for _ in range(size):
            bucket_of[name := next(names)] = k
            plant(trainer, name, [right(name)], k=k)
    assert trainer.parts.experience.bucket_sizes() == dict(enumerate(SIZES, start=1))
    steps = 800
    drawn = [name for step in range(steps) for name in trainer.replay.draw(step, mixed=True).replayed]
    assert len(drawn) == 2 * steps
    shares = np.bincount([bucket_of[name] for name in drawn], minlength=8)[1:] / len(drawn)
    # Four standard deviations of a share of 1600 draws.
    tolerance = 4 * np.sqrt(np.array(expected) * (1 - np.array(expected)) / len(drawn)) + 1e-3
    assert (np.abs(shares - expected) < tolerance).all(), shares


# experience.answer_choice

# Mean entropy, total entropy and mean negative log-prob under the untrained model:
# 2.967 23.7 2.71 | 2.965 11.9 3.11 | 2.955 14.8 3.13
CANDIDATES = ("????\\boxed{2}", "\\boxed{2}", "-\\boxed{2}")


@pytest.mark.parametrize(
    ("choice", "chosen", "num_scored"),
    [("lowest_perplexity", 0, 3), ("lowest_total_entropy", 1, 3), ("lowest_mean_entropy", 2, 3)],
)
def test_the_answer_replayed_is_the_lowest_by_the_measure_named(make, choice, chosen, num_scored):
    trainer = make(experience={"answer_choice": choice})
    plant(trainer, "q1", CANDIDATES)
    ids = [token_ids(trainer, text) for text in CANDIDATES]
    scored = trainer.parts.policy.score([(trainer.questions["q1"].prompt_ids, answer) for answer in ids], 1.0)
    measures = {
        "lowest_perplexity": [-float(score.logprobs.mean()) for score in scored],
        "lowest_total_entropy": [float(score.entropies.sum()) for score in scored],
        "lowest_mean_entropy": [float(score.entropies.mean()) for score in scored],
    }
    assert int(np.argmin(measures[choice])) == chosen
    result = trainer.step()
    np.testing.assert_array_equal(replayed_members(result.groups)["q1"].token_ids, ids[chosen])
    assert result.metrics["experience/scored_answers"] == num_scored


@pytest.mark.parametrize(
    ("choice", "chosen"),
    # Tokens 8 4 5; the first two have four pairs of neighbours in common, the third three with each.
    [("shortest", 1), ("newest", 2), ("agreement", 1)],
)
def test_the_answer_replayed_is_the_one_of_the_tokens_or_age_named(make, choice, chosen):
    trainer = make(experience={"answer_choice": choice})
    plant(trainer, "q1", CANDIDATES)
    result = trainer.step()
    member = replayed_members(result.groups)["q1"]
    np.testing.assert_array_equal(member.token_ids, token_ids(trainer, CANDIDATES[chosen]))
    assert result.metrics["experience/scored_answers"] == 0


def test_a_random_answer_is_any_of_them_and_none_is_scored(make):
    trainer = make(experience={"answer_choice": "random"})
    plant(trainer, "q1", CANDIDATES)
    results = [trainer.step() for _ in range(15)]
    chosen = {len(replayed_members(result.groups)["q1"].token_ids) for result in results}
    assert chosen == {8, 4, 5}
    assert all(result.metrics["experience/scored_answers"] == 0 for result in results)


def test_a_single_answer_is_replayed_without_scoring_it(make):
    trainer = make(experience={"answer_choice": "lowest_mean_entropy"})
    plant(trainer, "q1", CANDIDATES[:1])
    assert trainer.step().metrics["experience/scored_answers"] == 0


# experience.stored_answer


@pytest.mark.parametrize(("form", "padded"), [("tokens", 0), ("text", 1)])
def test_stored_answer_text_adds_an_eos_of_probability_one_to_a_truncated_answer(make, form, padded):
    trainer = make(experience={"stored_answer": form})
    whole = token_ids(trainer, right("q1"))
    plant(trainer, "q1", [whole[:-1]])
    result = trainer.step()
    member = replayed_members(result.groups)["q1"]
    np.testing.assert_array_equal(member.token_ids, whole if padded else whole[:-1])
    assert (member.logprobs[len(whole) - 1 :] == 0.0).sum() == padded
    assert result.metrics["experience/padded_logprobs"] == padded


def test_padded_log_probs_are_counted_for_the_replayed_answers_only(make):
    trainer = make(experience={"stored_answer": "text"})
    plant(trainer, "q1", [token_ids(trainer, right("q1", style))[:-1] for style in (0, 1, 2)])
    assert trainer.step().metrics["experience/padded_logprobs"] == 1


def test_stored_answer_text_keeps_special_tokens_inside_the_answer(make):
    """The released code decodes with special tokens, so that the recorded log-probs still have their tokens."""
    trainer = make(experience={"stored_answer": "text"})
    bos = trainer.questions["q1"].prompt_ids[0]
    inside = np.insert(token_ids(trainer, right("q1")), 1, bos).astype(np.int32)
    plant(trainer, "q1", [inside])
    result = trainer.step()
    np.testing.assert_array_equal(replayed_members(result.groups)["q1"].token_ids, inside)
    assert result.metrics["experience/padded_logprobs"] == 0


# experience.collect_from, start_pass_rate


@pytest.mark.parametrize(
    ("collect_from", "stored", "not_collected", "replayed"),
    [("start", [8, 4, 4], [0, 0, 0], [0, 2, 2]), ("mixed_phase", [0, 8, 4], [8, 0, 0], [0, 0, 2])],
)
def test_collection_from_the_mixed_phase_misses_what_was_solved_before(
    make, collect_from, stored, not_collected, replayed
):
    # Two of four are right in every group, so step 1 switches replay on. The released code's first mixed batch
    # therefore finds an empty buffer. Of a replayed question's three answers two are right, and are stored already.
    trainer = make(half_right, experience={"collect_from": collect_from, "start_pass_rate": 0.4})
    metrics = [trainer.step().metrics for _ in range(3)]
    assert [m["experience/replay_on"] for m in metrics] == [0, 1, 1]
    assert [m["experience/stored_this_step"] for m in metrics] == stored
    assert [m["experience/not_collected"] for m in metrics] == not_collected
    assert [m["experience/replayed_questions"] for m in metrics] == replayed


@pytest.mark.parametrize(("start", "replay_on"), [(None, [1, 1]), (0.49, [0, 1]), (0.5, [0, 0]), (1.0, [0, 0])])
def test_replay_waits_for_a_pass_rate_strictly_above_the_start(make, start, replay_on):
    # Two of four right in every group: the pass rate is exactly 0.5.
    trainer = make(half_right, experience={"start_pass_rate": start})
    assert [trainer.step().metrics["experience/replay_on"] for _ in range(2)] == replay_on


# experience.replay_ratio


@pytest.mark.parametrize(("ratio", "replayed"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_the_share_of_replayed_questions_is_rounded_down(make, ratio, replayed):
    trainer = make(experience={"replay_ratio": ratio})
    for name in ("q1", "q3", "q5", "q7", "q9"):
        plant(trainer, name, [right(name)])
    result = trainer.step()
    assert len(replayed_members(result.groups)) == replayed
    # K - 1 answers are sampled for a replayed question, K for a new one, and every group has K members.
    assert sorted(count for _, count in trainer.parts.engine.calls) == [3] * replayed + [4] * (4 - replayed)
    assert {group.size for group in result.groups} == {4}


# experience.retire_from


def solved(names):
    return lambda name, samples: [right(name) if name in names else wrong(name)] * samples


@pytest.mark.parametrize(("retire_from", "left"), [("replay", 30), ("replay_and_fresh", 26)])
def test_a_solved_question_leaves_the_new_ones_from_the_next_epoch_on_or_does_not(make, retire_from, left):
    trainer = make(num_questions=30, experience={"retire_from": retire_from})
    first_batch = [question.id for question in trainer.parts.order.take(4)]
    trainer = make(solved(first_batch), num_questions=30, experience={"retire_from": retire_from})
    results = [trainer.step() for _ in range(15)]
    assert results[0].metrics["experience/retired_this_step"] == 4
    assert {result.metrics["data/questions_left"] for result in results} == {left}
    seen = [name for result in results for name in fresh_ids(result)]
    assert len(seen) == 60  # nothing is replayed: what is solved is solved by all
    again = set(seen[30:]) & set(first_batch)
    assert again == (set(first_batch) if left == 30 else set())
    assert all(trainer.parts.experience.is_retired(name) for name in first_batch)


def test_new_questions_never_run_out_however_many_are_retired(make):
    # As in the released code a batch and 20 remain: with B = 4, removal stops at 25 of 30.
    trainer = make(lambda name, samples: [right(name)] * samples, num_questions=30)
    metrics = [trainer.step().metrics for _ in range(3)]
    assert [m["data/questions_left"] for m in metrics] == [26, 25, 25]
    assert [m["data/retired_kept"] for m in metrics] == [0, 3, 4]
    assert metrics[-1]["experience/retired"] == 12


# experience.unused_fresh, allow_duplicates; data.epoch_order


@pytest.mark.parametrize(
    ("unused", "expected"),
    [
        ("keep", [["q6", "q4"], ["q2", "q12"], ["q9", "q5"]]),
        ("discard", [["q6", "q4"], ["q9", "q5"], ["q3", "q8"]]),
    ],
)
def test_new_questions_that_replayed_ones_displace_stay_in_line_or_are_thrown_away(make, unused, expected):
    trainer = make(experience={"unused_fresh": unused})
    plant(trainer, "q1", [right("q1")])
    plant(trainer, "q10", [right("q10")])
    results = [trainer.step() for _ in range(3)]
    assert [fresh_ids(result) for result in results] == expected
    assert [result.metrics["data/discarded"] for result in results] == ([0, 0, 0] if unused == "keep" else [2, 2, 2])


@pytest.mark.parametrize(("allowed", "new", "bucket"), [(False, ["q2", "q12"], 3), (True, ["q6", "q4"], 2)])
def test_a_replayed_question_may_be_new_in_the_same_step_only_where_duplicates_are_allowed(make, allowed, new, bucket):
    trainer = make(half_right, experience={"allow_duplicates": allowed})
    plant(trainer, "q6", [right("q6", 2)])
    plant(trainer, "q4", [right("q4", 2)])
    result = trainer.step()
    assert set(replayed_members(result.groups)) == {"q6", "q4"}
    assert fresh_ids(result) == new
    # Replayed: two of three and the stored answer, k = 3. New: k = 2, and of two groups the later one counts.
    assert dict(trainer.parts.experience.questions())["q6"] == bucket


@pytest.mark.parametrize("order", ["same", "reshuffle"])
def test_later_epochs_repeat_the_order_or_are_shuffled_anew(make, order):
    trainer = make(data={"epoch_order": order})
    seen = [name for _ in range(6) for name in fresh_ids(trainer.step())]
    assert seen[:12] == LINE
    assert sorted(seen[12:]) == sorted(LINE)
    assert (seen[12:] == LINE) == (order == "same")


# experience.enabled


def test_experience_off_stores_retires_and_replays_nothing(make):
    trainer = make(half_right, experience={"enabled": False})
    plant(trainer, "q1", [right("q1")])
    results = [trainer.step() for _ in range(2)]
    assert not any(replayed_members(result.groups) for result in results)
    assert [result.metrics["experience/replay_on"] for result in results] == [0, 0]
    assert results[-1].metrics["experience/buffer_questions"] == 0
