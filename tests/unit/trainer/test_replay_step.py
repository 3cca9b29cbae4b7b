r"""The replay step (`experience.strategy`, `experience.replay_step`) through `Trainer.step`: loss, gradient, counts.

Unless a test says otherwise: B = 4 questions, K = 4 answers, responses of at most 96 tokens, no entropy bonus,
no weight decay, and nobody answers right, so that updates on new answers have no gradient. Seed 10 puts q6 q4 q2 q12 first. Right
answers of q1 to q8, such as `\boxed{2}`, have 4 tokens with the EOS; the ratio of a planted answer is as planted,
because no update comes before the replay step. A planted answer's group is one of four right.
"""

import pytest
from scripted import all_wrong, build_trainer, plant, right

WIDTH = 96


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer with replay steps, whose engine follows a script."""

    def build(script=all_wrong, *, replay_step=None, experience=None, **sections):
        return build_trainer(
            tmp_path,
            script,
            comm=data_parallel,
            experience={"strategy": "replay_step", "replay_step": replay_step or {}, **(experience or {})},
            loss_fn={"entropy_coeff": 0.0, **sections.pop("loss_fn", {})},
            **sections,
        )

    return build


def test_loss_is_the_weighted_normalized_ratio_over_longest_response_and_answers(make):
    trainer = make()
    plant(trainer, "q1", [right("q1")])
    plant(trainer, "q3", [right("q3"), right("q3")], ratio=0.1)
    metrics = trainer.step().metrics
    # Pass rates 1/4 and 2/4 (of the planted groups); 4 tokens each; g(1) = 11, g(.1) = 6.05; two answers.
    assert metrics["replay_step/loss"] == pytest.approx(-4 * (0.75 * 11 + 0.5 * 6.05) / (WIDTH * 2), rel=1e-4)
    assert metrics["replay_step/answers"] == 2
    assert metrics["replay_step/updates"] == 1
    assert metrics["replay_step/mean_weight"] == pytest.approx(0.625)
    # Pushes 1 and 3.025.
    assert metrics["replay_step/mean_push"] == pytest.approx((1 + 3.025) / 2, rel=1e-3)
    assert metrics["ratio_replay_step/min"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["ratio_replay_step/max"] == pytest.approx(1.0, rel=1e-3)
    assert metrics["policy/loss"] == metrics["policy/grad_norm"] == 0
    assert metrics["policy/version"] == metrics["budget/optimizer_steps"] == 2
