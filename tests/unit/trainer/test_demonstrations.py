"""Demonstrations as members of groups: who has one, what it weighs, and which of a file can be used.

B = K = 4, one optimiser step; seed 10 puts q6 q4 q2 q12 first. Sampled answers are wrong and have 4 tokens, as have the
demonstrations, the right boxes of q6 and q4: A = 3/4 of a demonstration and -1/4 of the three answers beside it.
"""

import json

import numpy as np
import pytest
from scripted import build_trainer, make_config, right, token_ids

from exgrpo_megatron import run_inputs
from exgrpo_megatron.errors import ConfigError, DataError

WIDTH, SEQUENCES = 96, 16


def wrong_one_digit(question_id, samples):
    return ["\\boxed{0}"] * samples


@pytest.fixture
def sections(tmp_path):
    """Demonstrations of q6 and q4, a wrong one of q4, and three that cannot be used."""

    def write(*rows):
        lines = [json.dumps({"question": question, "solution": solution}) for question, solution in rows]
        (tmp_path / "shown.jsonl").write_text("\n".join(lines))
        return {
            "demonstrations": {
                "enabled": True,
                "data": {"path": str(tmp_path / "shown.jsonl"), "solution_key": "solution"},
            },
            "experience": {"enabled": False},
            "loss_fn": {"entropy_coeff": 0.0},
        }

    return write


BOXES = [("6+1", right("q6")), ("4+1", right("q4"))]


def probabilities(trainer, name):
    """Of the tokens of a question's demonstration under the policy."""
    pair = (trainer.questions[name].prompt_ids, token_ids(trainer, right(name)))
    return np.exp(trainer.parts.policy.score([pair], 1.0)[0].logprobs.astype(np.float64))


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_a_demonstration_is_a_member_with_f_of_the_policys_own_probability(tmp_path, data_parallel, sections, gamma):
    raw = sections(*BOXES)
    raw["demonstrations"]["gamma"] = gamma
    trainer = build_trainer(tmp_path, wrong_one_digit, comm=data_parallel, **raw)
    p = np.concatenate([probabilities(trainer, name) for name in ("q6", "q4")])
    result = trainer.step()
    # Of each of the two groups 1/4 of 12 tokens with w = 1, and the demonstration's 4; the other two have no advantage.
    expected = (2 * 3 - 0.75 * float((p / (p + gamma)).sum())) / (WIDTH * SEQUENCES)
    assert result.metrics["policy/loss"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics["ratio_replayed/p50"] == pytest.approx(float(np.median(p)), rel=1e-3)
    assert result.metrics["ratio_replayed/shaped"] == pytest.approx(float((p / (p + gamma)).mean()), rel=1e-3)


def test_questions_with_a_demonstration_sample_one_answer_less(tmp_path, data_parallel, sections):
    trainer = build_trainer(tmp_path, wrong_one_digit, comm=data_parallel, **sections(*BOXES))
    result = trainer.step()
    assert trainer.parts.engine.calls == [("q6", 3), ("q4", 3), ("q2", 4), ("q12", 4)]
    assert [group.size for group in result.groups] == [4, 4, 4, 4]
    shown = {group.question.id: group.trajectories[-1] for group in result.groups[:2]}
    assert {name: (member.reward, member.replayed) for name, member in shown.items()} == {
        "q6": (1.0, True),
        "q4": (1.0, True),
    }
    metrics = result.metrics
    assert (metrics["demonstrations/members"], metrics["demonstrations/wrong"]) == (2, 0)
    # It counts in k and pass rates, and neither as replay nor as something to store.
    assert metrics["reward/pass_rate"] == 2 / 16
    assert metrics["reward/pass_rate_fresh"] == 0
    assert metrics["experience/replayed_questions"] == metrics["experience/stored_answers"] == 0


def test_a_wrong_demonstration_is_a_wrong_member(tmp_path, data_parallel, sections):
    trainer = build_trainer(tmp_path, wrong_one_digit, comm=data_parallel, **sections(("6+1", "\\boxed{8}")))
    metrics = trainer.step().metrics
    assert (metrics["demonstrations/members"], metrics["demonstrations/wrong"]) == (1, 1)
    assert metrics["policy/loss"] == pytest.approx(0, abs=1e-9)


def test_each_step_takes_any_of_several_and_the_same_one_after_a_resume(tmp_path, data_parallel, sections):
    raw = sections(("6+1", right("q6")), ("6+1", right("q6", 1)), ("6+1", right("q6", 2)))
    shown = [build_trainer(tmp_path, wrong_one_digit, comm=data_parallel, **raw).parts.demonstrations for _ in range(2)]
    question = run_inputs.load_inputs(make_config(tmp_path, **raw), data_parallel).train.questions[5]
    assert question.id == "q6"
    lengths = [[len(each.of(question, step).token_ids) for step in range(40)] for each in shown]
    assert lengths[0] == lengths[1]
    assert set(lengths[0]) == {4, 10, 16}


def test_what_of_a_file_cannot_be_used_is_counted_and_said(tmp_path, data_parallel, sections):
    raw = sections(*BOXES, ("77+1", "\\boxed{78}"), ("2+1", "=" * 200), ("2+1", "drei"), ("8+1", "8+1=9"))
    inputs = run_inputs.load_inputs(make_config(tmp_path, **raw), data_parallel)
    assert inputs.demonstrations.describe() == (
        "demonstrations: 3 of 3 of the 12 training questions; left out: 1 longer than policy.generation.max_new_tokens "
        "= 96, 1 of questions that are not used, 1 the tokenizer cannot write"
    )
    # The one without a box is closed with the gold answer.
    closed = inputs.demonstrations.of(inputs.train.questions[7], 1)
    assert inputs.tokenizer.decode(closed.token_ids) == "8+1=9\n\\boxed{9}"
    assert not closed.logprobs.any()


def test_a_file_of_which_nothing_can_be_used_is_refused(tmp_path, data_parallel, sections):
    config = make_config(tmp_path, **sections(("77+1", "\\boxed{78}")))
    with pytest.raises(DataError, match=r"demonstrations\.data: no demonstration is left.*1 of questions that are not"):
        run_inputs.load_inputs(config, data_parallel)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"enabled": True}, "demonstrations.enabled = true and experience.enabled = true"),
        ({"gamma": 0.2}, "gamma = 0.2 has no effect with enabled = false"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(tmp_path, raw, text):
    with pytest.raises(ConfigError, match=text):
        make_config(tmp_path, demonstrations=raw)
