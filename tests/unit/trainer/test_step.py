"""`Trainer.step` with a real Megatron actor, Math-Verify and buffer, and rollouts from a script.

Expected contents follow Algorithm 1 by hand: B = 4 questions, K = 4 answers, rho = 0.5, so at most 2 replayed. With
seed 10 the questions stand in line as 6 4 2 12 | 9 5 7 11 | 3 8 1 10: the first batch has one easy, one hard and two
mixed ones.
"""

import numpy as np
import pytest
from scripted import build_trainer, right, wrong

EASY, HARD, MIXED = ("q1", "q4", "q7", "q10"), ("q2", "q5", "q8", "q11"), ("q3", "q6", "q9", "q12")


def by_kind(question_id, samples):
    """Easy: all right. Hard: all wrong. Mixed: two right when new (k = 2), one right when replayed (k = 1 + 1)."""
    if question_id in EASY:
        return [right(question_id)] * samples
    if question_id in HARD:
        return [wrong(question_id)] * samples
    if samples == 4:
        return [right(question_id), right(question_id, 1), wrong(question_id), wrong(question_id)]
    return [right(question_id, 2), wrong(question_id), wrong(question_id)]


def stored_ids(trainer, question_id):
    return {tuple(answer.token_ids.tolist()) for answer in trainer.parts.experience.answers(question_id)}


def ids_of(trainer, text):
    return (*trainer.parts.tokenizer.encode(text), trainer.parts.tokenizer.eos_id)


def question_ids(result):
    return [group.question.id for group in result.groups]


@pytest.fixture
def trainer(tmp_path, data_parallel):
    return build_trainer(tmp_path, by_kind, comm=data_parallel)


def test_the_first_step_is_all_new_and_stores_retires_and_ignores_by_k(trainer):
    result = trainer.step()
    seen = question_ids(result)
    assert seen == ["q6", "q4", "q2", "q12"]
    assert not any(group.replayed for group in result.groups)
    experience = trainer.parts.experience
    assert experience.retired == {name for name in seen if name in EASY}
    mixed = [name for name in seen if name in MIXED]
    assert experience.num_questions == len(mixed)
    assert experience.num_answers == 2 * len(mixed)
    assert experience.bucket_sizes() == {1: 0, 2: len(mixed), 3: 0}
    for name in mixed:
        assert stored_ids(trainer, name) == {ids_of(trainer, right(name)), ids_of(trainer, right(name, 1))}
    for name in set(seen) & set(HARD):
        assert experience.answers(name) == ()


def test_stored_log_probs_are_the_policys_before_the_update(tmp_path, data_parallel):
    trainer = build_trainer(tmp_path, by_kind, comm=data_parallel)
    questions = list(trainer.questions.values())
    answers = [right(question.id) for question in questions]
    pairs = [
        (question.prompt_ids, np.array(ids_of(trainer, text), dtype=np.int32))
        for question, text in zip(questions, answers, strict=True)
    ]
    before = dict(zip(trainer.questions, trainer.parts.policy.score(pairs, 1.0), strict=True))
    result = trainer.step()
    checked = 0
    for name in set(question_ids(result)) & set(MIXED):
        stored = trainer.parts.experience.answers(name)[0]
        np.testing.assert_allclose(stored.logprobs, before[name].logprobs, atol=1e-6)
        assert (stored.policy_version, stored.step) == (0, 1)
        checked += 1
    assert checked


def test_later_steps_replay_half_of_the_batch_with_the_stored_answer_as_last_member(trainer):
    first = trainer.step()
    held = {name: trainer.parts.experience.answers(name) for name in set(question_ids(first)) & set(MIXED)}
    trainer.parts.engine.calls.clear()
    second = trainer.step()
    replayed = [group for group in second.groups if group.replayed]
    assert {group.question.id for group in replayed} == {"q6", "q12"}
    assert question_ids(second)[2:] == ["q9", "q5"]
    assert sorted(count for _, count in trainer.parts.engine.calls) == [3] * len(replayed) + [4] * (4 - len(replayed))
    for group in replayed:
        member = group.trajectories[-1]
        assert member.replayed
        assert not any(other.replayed for other in group.trajectories[:-1])
        recorded = {tuple(answer.token_ids.tolist()): answer.logprobs for answer in held[group.question.id]}
        np.testing.assert_array_equal(member.logprobs, recorded[tuple(member.token_ids.tolist())])
        # One of three new answers and the stored one are right: k = 2 of 4, advantages 1/2 and -1/2.
        assert group.num_correct == 2
        assert ids_of(trainer, right(group.question.id, 2)) in stored_ids(trainer, group.question.id)
        assert trainer.parts.experience.bucket_sizes()[2] == trainer.parts.experience.num_questions


def test_the_replayed_answer_has_the_lowest_mean_entropy_under_the_current_policy(trainer):
    trainer.step()
    candidates = {name: trainer.parts.experience.answers(name) for name in MIXED}
    scored = {
        name: trainer.parts.policy.score(
            [(trainer.questions[name].prompt_ids, answer.token_ids) for answer in answers], 1.0
        )
        for name, answers in candidates.items()
    }
    second = trainer.step()
    replayed = [group for group in second.groups if group.replayed]
    assert replayed
    for group in replayed:
        means = [float(score.entropies.mean()) for score in scored[group.question.id]]
        expected = candidates[group.question.id][int(np.argmin(means))]
        np.testing.assert_array_equal(group.trajectories[-1].token_ids, expected.token_ids)
    assert second.metrics["experience/scored_answers"] == 2 * len(replayed)


def test_a_replayed_question_solved_by_every_member_is_retired(tmp_path, data_parallel):
    def later_solved(question_id, samples):
        return by_kind(question_id, samples) if samples == 4 else [right(question_id, 2)] * samples

    trainer = build_trainer(tmp_path, later_solved, comm=data_parallel)
    trainer.step()
    second = trainer.step()
    replayed = [group.question.id for group in second.groups if group.replayed]
    assert replayed
    for name in replayed:
        assert trainer.parts.experience.is_retired(name)
        assert trainer.parts.experience.answers(name) == ()


def test_all_wrong_changes_no_experience_and_no_weights_but_the_entropy_bonus(tmp_path, data_parallel):
    trainer = build_trainer(
        tmp_path,
        lambda name, samples: [wrong(name)] * samples,
        comm=data_parallel,
        loss_fn={"entropy_coeff": 0.0},
        policy={"megatron_cfg": {"optimizer": {"weight_decay": 0.0}}},
    )
    before = {name: tensor.clone() for name, tensor in trainer.parts.policy.export_weights()}
    result = trainer.step()
    assert result.metrics["policy/grad_norm"] == 0.0
    assert result.metrics["groups/none_correct"] == 1.0
    assert trainer.parts.experience.num_questions == 0
    assert not trainer.parts.experience.retired
    for name, tensor in trainer.parts.policy.export_weights():
        assert bool((tensor == before[name]).all()), name
    # An empty buffer: the next step is all new again.
    assert not any(group.replayed for group in trainer.step().groups)


def test_replay_waits_for_a_pass_rate_strictly_above_the_start(tmp_path, data_parallel):
    # k = 2 of 4 everywhere: the pass rate is exactly 0.5, not above it.
    def half(name, samples):
        return [right(name), right(name, 1), wrong(name), wrong(name)][:samples]

    waiting = build_trainer(tmp_path, half, comm=data_parallel, experience={"start_pass_rate": 0.5})
    for _ in range(2):
        assert waiting.step().metrics["experience/replay_on"] == 0.0
    starting = build_trainer(tmp_path, half, comm=data_parallel, experience={"start_pass_rate": 0.49})
    assert [starting.step().metrics["experience/replayed_questions"] for _ in range(2)] == [0, 2]


def test_displaced_new_questions_stay_in_line(trainer):
    seen = [name for _ in range(3) for name in question_ids(trainer.step()) if name]
    new = [name for name, count in trainer.parts.engine.calls if count == 4]
    assert len(seen) == 12
    # No new question comes twice before every question has been in line once (12 questions, fewer than 12 new).
    assert len(set(new)) == len(new)


def test_an_update_makes_rewarded_answers_likelier(tmp_path, data_parallel):
    trainer = build_trainer(tmp_path, by_kind, comm=data_parallel)
    result = trainer.step()
    group = next(group for group in result.groups if group.question.id in MIXED)
    pairs = [(group.question.prompt_ids, member.token_ids) for member in group.trajectories]
    after = trainer.parts.policy.score(pairs, 1.0)
    gain = [
        float(new.logprobs.sum() - member.logprobs.sum()) for new, member in zip(after, group.trajectories, strict=True)
    ]
    assert gain[0] + gain[1] > gain[2] + gain[3]


def test_experience_off_is_plain_grpo(tmp_path, data_parallel):
    trainer = build_trainer(tmp_path, by_kind, comm=data_parallel, experience={"enabled": False})
    for _ in range(3):
        result = trainer.step()
        assert not any(group.replayed for group in result.groups)
    assert trainer.parts.experience.num_questions == 0
    assert not trainer.parts.experience.retired
