"""Rewards between 0 and 1 through the whole step: advantages, k, storing, and what is measured.

The function is that of the embedded example: half for the right box, half for the line of working. B = K = 4; seed 10
puts q6 q4 q2 q12 first, whose right answers have 10 tokens with their working (q12: 13) and 4 without it (q12: 5), and
whose wrong ones have 5.
"""

from dataclasses import replace

import pytest
from scripted import ScriptedEngine, build_trainer, right, wrong

from exgrpo_megatron.evaluator import Evaluator
from exgrpo_megatron.rewards.function import FunctionVerifier

ENV = {
    "reward_function": "exgrpo_megatron.data.chain_arithmetic:partial_credit",
    "correct_above": 0.5,
    "math": {"num_workers": 1},
}
WIDTH, SEQUENCES = 96, 16


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer whose engine follows a script, graded by the function."""
    verifiers = []

    def build(script, env=None, **sections):
        sections = {"env": {**ENV, **(env or {})}, "loss_fn": {"entropy_coeff": 0.0}, **sections}
        made = build_trainer(tmp_path, script, comm=data_parallel, **sections)
        verifiers.append(FunctionVerifier(made.config.env))
        made.parts = made.rollouts.parts = replace(made.parts, verifier=verifiers[-1])
        return made

    yield build
    for verifier in verifiers:
        verifier.close()


@pytest.fixture
def trainer(make):
    """Its answers earn 1, 1/2, 0, 0."""

    def script(question_id, samples):
        return [right(question_id, 1), right(question_id), wrong(question_id), wrong(question_id)][:samples]

    return make(script)


def test_advantages_are_made_of_the_rewards_and_k_of_those_above_the_threshold(trainer):
    result = trainer.step()
    # The mean is 3/8: 10 x 5/8 + 4 x 1/8 - 10 x 3/8 = 3 for q6, q4 and q2, and 13 x 5/8 + 5 x 1/8 - 10 x 3/8 = 5.
    assert result.metrics["policy/loss"] == pytest.approx(-(3 * 3 + 5) / (WIDTH * SEQUENCES), rel=1e-3)
    assert result.metrics["reward/mean"] == 0.375
    # Only the first is correct: k = 1, and it alone is stored.
    assert result.metrics["reward/pass_rate"] == 0.25
    assert result.metrics["reward/correct"] == 4
    assert result.metrics["experience/bucket_1"] == result.metrics["experience/stored_answers"] == 4
    assert [member.reward for member in result.groups[0].trajectories] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("above", "retired", "bucket"), [(None, 4, 0), (0.4, 4, 0), (0.9, 0, 4)])
def test_a_question_is_retired_when_every_reward_is_above_what_solved_means(make, above, retired, bucket):
    def script(question_id, samples):
        return [right(question_id, 1), right(question_id)][:samples] * (samples // 2)

    # Rewards 1, 1/2, 1, 1/2, which all are correct: k = 4.
    metrics = make(script, env={"correct_above": 0.25}, experience={"solved_above": above}).step().metrics
    assert metrics["experience/retired_this_step"] == retired
    assert metrics["experience/bucket_3"] == bucket
    assert metrics["groups/all_correct"] == 1


def test_a_replayed_answer_is_graded_by_the_function_too(trainer):
    trainer.step()
    groups = trainer.step().groups
    replayed = [member for group in groups for member in group.trajectories if member.replayed]
    assert [(member.reward, member.correct) for member in replayed] == [(1.0, True)] * 2


def test_an_evaluation_says_the_mean_reward_beside_the_pass_rate(trainer):
    parts = trainer.parts
    engine = ScriptedEngine(parts.tokenizer, parts.train.questions, lambda name, samples: [right(name)] * samples)
    evaluator = Evaluator(
        parts.config.eval,
        parts.train.questions[:2],
        engine,
        parts.verifier,
        parts.tokenizer,
        parts.sampling,
        parts.comm,
        report_rewards=True,
    )
    metrics = evaluator.run().metrics
    assert metrics["validation/reward_t1"] == metrics["validation/reward_greedy"] == 0.5
    assert metrics["validation/pass_rate_t1"] == metrics["validation/pass_rate_greedy"] == 0.0
