"""Off-policy groups of recent answers through the whole step: when, with which loss, and through a stop and resume.

B = K = 4 and four questions, so that every step has all of them; one optimiser step of 16 new answers. Half of the
answers are right; all have 4 tokens (but for the first test).
"""

import pytest
from scripted import build_trainer, half_right, logprobs_at_ratio, make_config, right, token_ids
from test_resume import untimed, weights

from exgrpo_megatron.errors import ConfigError

WIDTH, SEQUENCES = 96, 16
SLOW = {"megatron_cfg": {"optimizer": {"lr": 1e-12, "min_lr": 0.0}}}
"""The policy stays where it is, so that every ratio is that of the recorded log-probs."""


def of_four_tokens(question_id, samples):
    return [*[right(question_id)] * 2, *["\\boxed{0}"] * 2][:samples]


@pytest.fixture
def make(tmp_path, data_parallel):
    def build(script, repo=None, loss_fn=None, **sections):
        return build_trainer(
            tmp_path,
            script,
            comm=data_parallel,
            num_questions=4,
            experience={"enabled": False},
            repo={"enabled": True, "min_kept": 4, "max_kept": 8, "num_answers": 4, **(repo or {})},
            loss_fn={"entropy_coeff": 0.0, **(loss_fn or {})},
            **{"policy": SLOW, **sections},
        )

    return build


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_second_groups_have_a_loss_of_their_own_beside_that_of_the_new_answers(make, weight):
    trainer = make(half_right, {"choice": "recent", "weight": weight})
    first, second = trainer.step().metrics, trainer.step().metrics
    # 4 x .5 + 10 x .5 - 10 x .5 = 2 of each group, of four groups, over 16 sequences: once, then as much again.
    assert first["policy/loss"] == pytest.approx(-8 / (WIDTH * SEQUENCES), rel=1e-4)
    assert second["policy/loss"] == pytest.approx(-8 * (1 + weight) / (WIDTH * SEQUENCES), rel=1e-4)
    assert second["policy/grad_norm"] == pytest.approx((1 + weight) * first["policy/grad_norm"], rel=1e-3)
    counted = {"repo/groups": 4, "repo/mixed_groups": 4, "repo/answers": 16, "repo/kept_answers": 32, "repo/refused": 0}
    assert {name: second[name] for name in counted} == counted
    assert (first["repo/groups"], first["repo/kept_answers"]) == (0, 16)
    assert "ratio_replayed/min" in second
    assert "ratio_replayed/shaped" not in second  # the ratio is clipped, f has no part in it
    assert (first["budget/stored_answers"], second["budget/stored_answers"]) == (0, 16)


def test_an_off_policy_group_knows_only_its_own_rewards(make):
    trainer = make(of_four_tokens, {"choice": "best_reward", "num_answers": 2})
    trainer.step()
    metrics = trainer.step().metrics
    # The two best are right, hence equal: no advantage, though they are better than the group's other answers.
    assert (metrics["repo/groups"], metrics["repo/mixed_groups"], metrics["repo/answers"]) == (4, 0, 8)
    assert metrics["policy/loss"] == pytest.approx(0, abs=1e-8)


def test_replayed_tokens_are_clipped_as_new_ones_are(make):
    trainer = make(of_four_tokens, {"choice": "recent"}, {"old_logprobs": "engine"})

    def recorder(question, ids):
        is_right = ids.tolist() == token_ids(trainer, right(question.id)).tolist()
        return logprobs_at_ratio(trainer, question, ids, 1.5 if is_right else 0.5)

    trainer.parts.engine.recorder = recorder
    first, second = trainer.step().metrics, trainer.step().metrics
    # Right: -min(1.5 / 2, 1.2 / 2) = -.6; wrong: -min(-.5 / 2, -.8 / 2) = .4; 32 tokens of each, then twice.
    assert first["policy/loss"] == pytest.approx(-0.2 * 32 / (WIDTH * SEQUENCES), rel=1e-4)
    assert second["policy/loss"] == pytest.approx(2 * -0.2 * 32 / (WIDTH * SEQUENCES), rel=1e-4)
    assert second["ratio_replayed/max"] == pytest.approx(1.5, rel=1e-4)
    assert second["policy/grad_norm"] == 0


def test_second_groups_are_in_the_optimiser_step_of_their_questions(make, monkeypatch):
    trainer = make(of_four_tokens, {"choice": "recent"}, policy={**SLOW, "train_global_batch_size": 8})
    trainer.step()
    seen = []
    update = trainer.parts.policy.update

    def watched(sequences, *args, **keys):
        seen.append(sequences)
        return update(sequences, *args, **keys)

    monkeypatch.setattr(trainer.parts.policy, "update", watched)
    trainer.step()
    prompts = [
        [
            {tuple(sequence.prompt_ids) for sequence in sequences if sequence.replayed == replayed}
            for replayed in (False, True)
        ]
        for sequences in seen
    ]
    assert [len(sequences) for sequences in seen] == [16, 16]
    assert [len(new) for new, _ in prompts] == [2, 2]
    assert all(new == replayed for new, replayed in prompts)
    # Each loss divides by its own 8 sequences.
    assert {sequence.policy_weight for sequences in seen for sequence in sequences} == {1 / (WIDTH * 8)}


def test_three_steps_a_stop_and_three_more_equal_six(tmp_path, run_steps):
    options = {
        "num_questions": 4,
        "experience": {"enabled": False},
        "repo": {"enabled": True, "choice": "random", "min_kept": 4, "max_kept": 8, "num_answers": 4},
        "checkpointing": {"export_hf": False},
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    straight, _ = run_steps(make_config(whole, **options), 6)
    run_steps(make_config(cut, **options), 3)
    second, _ = run_steps(make_config(cut, **options), 3)
    expected = weights(straight)
    assert all(bool((tensor == expected[name]).all()) for name, tensor in weights(second).items())
    metrics = untimed(cut / "run" / "metrics.jsonl")
    assert metrics == untimed(whole / "run" / "metrics.jsonl")
    assert [record["repo/answers"] for record in metrics] == [0, 16, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"repo": {"enabled": True}}, "repo.enabled = true and experience.enabled = true"),
        ({"repo": {"choice": "recent"}}, "choice = 'recent' has no effect with enabled = false"),
        (
            {"repo": {"enabled": True, "choice": "full_scope", "num_answers": 4}, "experience": {"enabled": False}},
            "num_answers = 4 has no effect with choice = 'full_scope'",
        ),
        (
            {"repo": {"enabled": True, "max_kept": 8}, "experience": {"enabled": False}},
            "min_kept = 16 is above max_kept = 8",
        ),
        (
            {
                "repo": {"enabled": True},
                "experience": {"enabled": False},
                "loss_fn": {"disable_ppo_ratio": True},
            },
            "loss_fn.disable_ppo_ratio = true, but repo.enabled = true",
        ),
        (
            {"repo": {"enabled": True}, "experience": {"enabled": False}, "variant": "code"},
            "loss_fn.entropy_bonus = 'per_micro_batch', but repo.enabled = true",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, sections, text):
    with pytest.raises(ConfigError, match=text):
        make_config(tmp_path, **sections)
