r"""Every key of `loss_fn:` and of advantages changes loss and gradient by the amount it says, through `Trainer.step`.

B = 4 questions, K = 4 answers, one optimiser step of 16 sequences, responses of at most 96 tokens, no entropy bonus
unless it is what is tested. With recomputed log-probs w = 1 for every new token. Seed 10 puts q6 q4 q2 q12 first;
their right answers, such as `\boxed{7}`, have 4 tokens (the box is one) with the EOS, that of q12 has 5. Those of eight
questions all have 4.
"""

import math

import numpy as np
import pytest
from scripted import (
    all_wrong,
    build_trainer,
    half_right,
    logprobs_at_ratio,
    plant,
    replayed_members,
    right,
    token_ids,
)

WIDTH, SEQUENCES = 96, 16


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer without entropy bonus whose engine follows a script."""

    def build(script, *, loss_fn=None, **sections):
        loss = {"entropy_coeff": 0.0, **(loss_fn or {})}
        return build_trainer(tmp_path, script, comm=data_parallel, loss_fn=loss, **sections)

    return build


def wrong_one_digit(question_id):
    return "\\boxed{0}"


def half_of_four_tokens(question_id, samples):
    """Answers of 4 tokens, for questions q1 to q8; the first two of four right."""
    return [*[right(question_id)] * 2, *[wrong_one_digit(question_id)] * 2][:samples]


def none_of_four_tokens(question_id, samples):
    return [wrong_one_digit(question_id)] * samples


def ratios(trainer, right_answers, wrong_answers):
    """Makes the engine report log-probs that give right and wrong answers these ratios w."""

    def recorder(question, ids):
        is_right = np.array_equal(ids, token_ids(trainer, right(question.id)))
        return logprobs_at_ratio(trainer, question, ids, right_answers if is_right else wrong_answers)

    trainer.parts.engine.recorder = recorder


# loss_fn.normalizer


@pytest.mark.parametrize(
    ("normalizer", "loss"),
    [
        # q6, q4, q2: right answers of 4 and 10 tokens, wrong ones of 5 and 5, A = +-1/2: (14 - 10) / 2 = 2 a group.
        # q12: 5 + 13 against 5 + 5 makes 4. In all 10 tokens more are pushed up than down.
        ("global_width", -10 / (WIDTH * SEQUENCES)),
        ("rank_width", -10 / WIDTH),
        # Every answer counts once, and advantages sum to 0 in every group.
        ("per_answer_length", 0.0),
    ],
)
def test_the_loss_is_divided_as_the_normalizer_says(make, normalizer, loss):
    trainer = make(half_right, loss_fn={"normalizer": normalizer})
    assert trainer.step().metrics["policy/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)


def test_the_gradient_scales_as_the_normalizer_says(make):
    # All answers have 4 tokens: the gradients are parallel, 1/(96 * 16), 1/96 and 1/(4 * 16) of the same sum.
    norms = {
        normalizer: make(half_of_four_tokens, num_questions=8, loss_fn={"normalizer": normalizer})
        .step()
        .metrics["policy/grad_norm"]
        for normalizer in ("global_width", "rank_width", "per_answer_length")
    }
    assert norms["rank_width"] / norms["global_width"] == pytest.approx(16, rel=1e-4)
    assert norms["per_answer_length"] / norms["global_width"] == pytest.approx(24, rel=1e-4)


# loss_fn.disable_ppo_ratio, grpo.scale_by_informative_groups


def test_without_the_ratio_the_loss_is_advantage_times_log_prob_with_the_gradient_of_the_ratio_at_one(make):
    off = {"enabled": False}
    ratio = make(half_of_four_tokens, num_questions=8, experience=off).step().metrics
    trainer = make(half_of_four_tokens, num_questions=8, experience=off, loss_fn={"disable_ppo_ratio": True})
    names = [question.id for question in make(half_of_four_tokens, num_questions=8).parts.order.take(4)]
    pairs = [
        (trainer.questions[name].prompt_ids, token_ids(trainer, text))
        for name in names
        for text in half_of_four_tokens(name, 4)
    ]
    logprobs = [float(score.logprobs.sum()) for score in trainer.parts.policy.score(pairs, 1.0)]
    metrics = trainer.step().metrics
    # A = 1/2 of the first two of each group, -1/2 of the others.
    expected = -sum(0.5 * value * (1 if i % 4 < 2 else -1) for i, value in enumerate(logprobs)) / (WIDTH * SEQUENCES)
    assert metrics["policy/loss"] == pytest.approx(expected, rel=1e-3)
    assert metrics["policy/grad_norm"] == pytest.approx(ratio["policy/grad_norm"], rel=1e-4)
    assert metrics["policy/clip_share"] == 0


def test_groups_that_differ_make_up_for_those_that_do_not(make):
    def one_group_of_four_differs(question_id, samples):
        return half_of_four_tokens(question_id, samples) if question_id == "q6" else ["\\boxed{0}"] * samples

    norms = [
        make(one_group_of_four_differs, num_questions=8, grpo={"scale_by_informative_groups": on})
        .step()
        .metrics["policy/grad_norm"]
        for on in (False, True)
    ]
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-4)


# loss_fn.ratio_clip_min, ratio_clip_max, clip_in_mixed_phase, old_logprobs


@pytest.mark.parametrize(
    ("keys", "mixed", "per_token", "clip_share"),
    [
        # Right: w = 1.5, A = 1/2: -min(.75, 1.2 / 2) = -.6. Wrong: w = .5, A = -1/2: -min(-.25, -.8 / 2) = .4.
        ({}, False, (-0.6, 0.4), 1.0),
        ({"ratio_clip_max": 0.4}, False, (-0.7, 0.4), 1.0),
        ({"ratio_clip_max": 0.6}, False, (-0.75, 0.4), 0.5),
        ({"ratio_clip_min": 0.4}, False, (-0.6, 0.3), 1.0),
        ({"ratio_clip_min": 0.6}, False, (-0.6, 0.25), 0.5),
        ({"clip_in_mixed_phase": True}, True, (-0.6, 0.4), 1.0),
        ({"clip_in_mixed_phase": False}, True, (-0.75, 0.25), 0.0),
        # The on-policy phase is clipped in every variant.
        ({"clip_in_mixed_phase": False}, False, (-0.6, 0.4), 1.0),
    ],
)
def test_new_tokens_are_clipped_as_the_keys_say(make, keys, mixed, per_token, clip_share):
    trainer = make(
        half_of_four_tokens,
        num_questions=8,
        loss_fn={"old_logprobs": "engine", **keys},
        experience={"start_pass_rate": None if mixed else 1.0},
    )
    ratios(trainer, right_answers=1.5, wrong_answers=0.5)
    metrics = trainer.step().metrics
    # Four groups of two right and two wrong answers of 4 tokens: 32 tokens of each kind.
    assert metrics["policy/loss"] == pytest.approx(32 * sum(per_token) / (WIDTH * SEQUENCES), rel=1e-4)
    assert metrics["policy/clip_share"] == clip_share
    assert metrics["ratio_fresh/max"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["ratio_fresh/min"] == pytest.approx(0.5, rel=1e-4)


def test_old_log_probs_of_the_engine_are_the_denominators_and_are_what_is_stored(make):
    trainer = make(half_right, loss_fn={"old_logprobs": "engine"})
    question = trainer.questions["q6"]
    ids = token_ids(trainer, right("q6"))
    policys = trainer.parts.policy.score([(question.prompt_ids, ids)], 1.0)[0].logprobs
    metrics = trainer.step().metrics
    # The engine says -0.5 a token; the untrained policy about log(1/21) = -3.0, hence w near exp(-2.5) = .08.
    assert 0.01 < metrics["ratio_fresh/p50"] < 0.2
    np.testing.assert_array_equal(trainer.parts.experience.answers("q6")[0].logprobs, np.float32(-0.5))

    trainer = make(half_right, loss_fn={"old_logprobs": "recomputed"})
    metrics = trainer.step().metrics
    assert metrics["ratio_fresh/min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_fresh/max"] == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(trainer.parts.experience.answers("q6")[0].logprobs, policys, atol=1e-5)


# loss_fn.max_abs_log_ratio; experience.shaping, shaping_beta


def replay_one(make, ratio, **keys):
    """A step whose only gradient is that of one replayed group: a stored answer of ratio w and three wrong answers."""
    trainer = make(none_of_four_tokens, num_questions=8, **keys)
    plant(trainer, "q1", [right("q1")], ratio=ratio)
    result = trainer.step()
    assert set(replayed_members(result.groups)) == {"q1"}
    assert result.metrics["ratio_replayed/p50"] == pytest.approx(ratio, rel=1e-4)
    return result.metrics


@pytest.mark.parametrize(
    ("shaping", "beta", "ratio", "value"),
    [
        # The published values of f(w) = w / (w + beta).
        ("ratio", 0.1, 0.1, 0.5),
        ("ratio", 0.1, 1.0, 0.90909),
        ("ratio", 0.1, 5.0, 0.98039),
        ("ratio", 0.1, 10.0, 0.99010),
        ("ratio", 0.5, 1.0, 0.66667),
        ("none", 0.1, 1.0, 1.0),
        ("none", 0.1, 5.0, 5.0),
    ],
)
def test_replayed_tokens_are_shaped_as_the_keys_say(make, shaping, beta, ratio, value):
    metrics = replay_one(make, ratio, experience={"shaping": shaping, "shaping_beta": beta})
    # k = 1 of 4: A = 3/4 on 4 replayed tokens, -1/4 on the 12 of the wrong answers, whose w is 1: 3 - 3 f(w).
    assert metrics["policy/loss"] == pytest.approx(3 * (1 - value) / (WIDTH * SEQUENCES), rel=1e-3, abs=1e-7)


def test_a_replayed_token_pulls_a_twelfth_as_hard_where_the_policy_has_not_moved(make):
    # The engine's -0.5 a token makes w < 0.8 for the wrong answers, so the clip removes their gradient and the norm is
    # that of the stored answer alone: in proportion to w f'(w) = w beta / (w + beta)^2, or to w without shaping.
    def norm(ratio, shaping):
        loss = {"old_logprobs": "engine", "clip_in_mixed_phase": True}
        metrics = replay_one(make, ratio, loss_fn=loss, experience={"shaping": shaping})
        assert metrics["policy/clip_share"] == pytest.approx(12 / 60)  # the other groups have no advantage to clip
        return metrics["policy/grad_norm"]

    plain = norm(1.0, "none")
    assert norm(1.0, "ratio") / plain == pytest.approx(0.0826446, rel=1e-3)
    assert norm(0.1, "ratio") / plain == pytest.approx(0.25, rel=1e-3)
    assert norm(2.0, "none") / plain == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(("bound", "weight", "clamped"), [(20.0, math.e**3, 0), (1.0, math.e, 4)])
def test_log_ratios_are_clamped_and_counted(make, bound, weight, clamped):
    metrics = replay_one(make, math.e**3, loss_fn={"max_abs_log_ratio": bound}, experience={"shaping": "none"})
    assert metrics["policy/loss"] == pytest.approx(3 * (1 - weight) / (WIDTH * SEQUENCES), rel=1e-3)
    assert metrics["policy/clamped_ratios"] == clamped


def test_a_log_ratio_that_is_not_used_is_not_clamped(make):
    metrics = replay_one(make, math.e**3, loss_fn={"max_abs_log_ratio": 1.0}, experience={"shaping": "log_prob"})
    assert metrics["ratio_replayed/min"] == pytest.approx(math.e**3, rel=1e-3)
    assert metrics["policy/clamped_ratios"] == 0


# loss_fn.use_importance_sampling_correction, rollout_is, truncated_importance_sampling_*


def limits(kind, low, high):
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


@pytest.mark.parametrize(
    ("keys", "weights", "limited_share"),
    [
        ({}, (1.5, 0.5), 0.0),
        (limits("tis", None, 1.2), (1.2, 0.5), 0.5),
        (limits("tis", 0.6, 1.2), (1.2, 0.6), 1.0),
        (limits("icepop", 0.6, 2.0), (1.5, 0.0), 0.5),
        (limits("seq-mask-tis", 0.4, 1.2), (0.0, 0.5), 0.5),
        # Products over 4 tokens.
        ({"rollout_is": "sequence"}, (1.5**4, 0.5**4), 0.0),
        ({"rollout_is": "sequence", **limits("tis", None, 2.0)}, (2.0, 0.5**4), 0.5),
    ],
)
def test_new_tokens_are_weighed_by_the_policys_probability_over_the_engines(make, keys, weights, limited_share):
    loss_fn = {"use_importance_sampling_correction": True, **keys}
    trainer = make(half_of_four_tokens, num_questions=8, loss_fn=loss_fn)
    ratios(trainer, right_answers=1.5, wrong_answers=0.5)
    metrics = trainer.step().metrics
    high, low = weights
    # 32 tokens with A = 1/2 and 32 with A = -1/2, all with w = 1 against the recomputed denominators.
    assert metrics["policy/loss"] == pytest.approx(16 * (low - high) / (WIDTH * SEQUENCES), rel=1e-3)
    assert metrics["correction/mean"] == pytest.approx((high + low) / 2, rel=1e-4)
    assert metrics["correction/max"] == pytest.approx(max(weights), rel=1e-4)
    assert metrics["correction/limited_share"] == limited_share
    assert metrics["correction/ess"] == pytest.approx((high + low) ** 2 / (2 * (high**2 + low**2)), rel=1e-4)
    assert metrics["ratio_fresh/max"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_engine/max"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["ratio_engine/min"] == pytest.approx(0.5, rel=1e-4)


def test_a_replayed_answer_is_not_weighed(make):
    trainer = make(
        none_of_four_tokens, num_questions=8, loss_fn={"use_importance_sampling_correction": True, "entropy_coeff": 0.0}
    )
    plant(trainer, "q1", [right("q1")])
    trainer.parts.engine.recorder = lambda question, ids: logprobs_at_ratio(trainer, question, ids, 2.0)
    # A = 3/4 on 4 replayed tokens with f(1) = .90909, -1/4 on the 12 of the wrong answers, each of which weighs 2.
    assert trainer.step().metrics["policy/loss"] == pytest.approx(3 * (2 - 0.90909) / (WIDTH * SEQUENCES), rel=1e-3)


# grpo.overlong_filtering, reward_shaping


def one_of_four_cut(question_id, samples):
    """Right, wrong, wrong (4 tokens each), and one that never ends."""
    return [right(question_id), *[wrong_one_digit(question_id)] * 2, "=" * 200][:samples]


@pytest.mark.parametrize(
    ("filtering", "loss"),
    [
        # A = 3/4 on 4 tokens, -1/4 on 4 + 4 + 96: (26 - 3) a group.
        (False, 4 * 23 / (WIDTH * SEQUENCES)),
        # Without the last (2 - 3) a group, and three sequences of each group are counted.
        (True, -4 / (WIDTH * 12)),
    ],
)
def test_truncated_answers_are_left_out_of_the_loss_if_the_key_says_so(make, filtering, loss):
    trainer = make(one_of_four_cut, num_questions=8, grpo={"overlong_filtering": filtering})
    metrics = trainer.step().metrics
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-3)
    assert metrics["rollout/truncated"] == 4
    assert metrics["reward/pass_rate"] == 0.25


@pytest.mark.parametrize("filtering", [True, False])
def test_a_correct_answer_left_out_of_the_loss_is_not_kept_for_replay(make, filtering):
    def right_but_endless(question_id, samples):
        return [right(question_id) + "=" * 200, *[wrong_one_digit(question_id)] * 3][:samples]

    metrics = make(right_but_endless, num_questions=8, grpo={"overlong_filtering": filtering}).step().metrics
    assert metrics["reward/pass_rate"] == 0.25
    assert metrics["experience/stored_this_step"] == (0 if filtering else 4)
    assert metrics["experience/truncated"] == (4 if filtering else 0)


def test_a_step_of_which_nothing_is_left_has_no_loss_and_no_gradient(make):
    metrics = make(lambda _, samples: ["=" * 200] * samples, grpo={"overlong_filtering": True}).step().metrics
    assert metrics["policy/loss"] == metrics["policy/grad_norm"] == metrics["policy/padding_share"] == 0
    assert "policy/entropy" not in metrics


def test_long_answers_lose_reward_but_stay_correct(make):
    shaping = {"enabled": True, "overlong_buffer_length": 8, "overlong_buffer_penalty": 0.4, "max_response_length": 12}
    metrics = make(half_right, grpo={"reward_shaping": shaping}).step().metrics
    # q6, q4, q2: 4, 10, 5, 5 tokens lose 0, .3, .05, .05: rewards 1, .7, -.05, -.05 with mean .4, so
    # 4 x .6 + 10 x .3 - 10 x .45 = .9. q12: 5, 13, 5, 5 tokens lose .05, .4, .05, .05: rewards .95, .6, -.05, -.05
    # with mean .3625, so 5 x .5875 + 13 x .2375 - 10 x .4125 = 1.9.
    assert metrics["policy/loss"] == pytest.approx(-(3 * 0.9 + 1.9) / (WIDTH * SEQUENCES), rel=1e-3)
    assert metrics["reward/length_penalty"] == pytest.approx((3 * 0.4 + 0.55) / 16)
    assert metrics["reward/pass_rate"] == 0.5
    assert metrics["experience/bucket_2"] == 4


# grpo.normalize_rewards, use_leave_one_out_baseline


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 1.0),
        # The unbiased deviation of 1 1 0 0 is root(1/3); the mean of the other three is 4/3 as far away,
        # and their deviation, of 1 0 0 or 1 1 0, is root(1/3) as well.
        ({"normalize_rewards": True}, math.sqrt(3)),
        ({"use_leave_one_out_baseline": True}, 4 / 3),
        ({"normalize_rewards": True, "use_leave_one_out_baseline": True}, 4 / 3 * math.sqrt(3)),
    ],
)
def test_advantages_scale_loss_and_gradient(make, keys, factor):
    base = make(half_right).step().metrics
    metrics = make(half_right, grpo=keys).step().metrics
    assert metrics["policy/loss"] == pytest.approx(-10 * factor / (WIDTH * SEQUENCES), rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(factor * base["policy/grad_norm"], rel=1e-4)


# loss_fn.entropy_bonus, entropy_coeff


def mean_entropies(trainer, names):
    """Mean entropy of each question's wrong answer: in a step without a right one all four answers are that one."""
    pairs = [(trainer.questions[name].prompt_ids, token_ids(trainer, all_wrong(name, 1)[0])) for name in names]
    return [float(score.entropies.mean()) for score in trainer.parts.policy.score(pairs, 1.0)]


@pytest.mark.parametrize(
    ("bonus", "coeff", "micro_batch", "factor"),
    [
        ("global_mean", 0.01, 16, 1),
        ("global_mean", 0.01, 4, 1),
        ("global_mean", 0.03, 16, 3),
        ("per_micro_batch", 0.01, 16, 1),
        # One mean a micro-batch of one group, four groups.
        ("per_micro_batch", 0.01, 4, 4),
        ("per_micro_batch", 0.03, 4, 12),
        ("none", 0.001, 16, 0),
        ("global_mean", 0.0, 16, 0),
    ],
)
def test_the_entropy_bonus_is_a_mean_times_the_coefficient(make, bonus, coeff, micro_batch, factor):
    # All wrong: no advantages, so loss and gradient are the bonus alone. All answers have 5 tokens.
    trainer = make(
        all_wrong,
        num_questions=8,
        loss_fn={"entropy_bonus": bonus, "entropy_coeff": coeff},
        policy={"train_micro_batch_size": micro_batch},
    )
    names = [question.id for question in make(all_wrong, num_questions=8).parts.order.take(4)]
    mean = float(np.mean(mean_entropies(trainer, names)))
    metrics = trainer.step().metrics
    assert metrics["policy/loss"] == pytest.approx(-0.01 * factor * mean, rel=1e-5, abs=1e-12)
    assert metrics["policy/entropy"] == pytest.approx(mean, rel=1e-5)
    assert (metrics["policy/grad_norm"] > 0) == (factor > 0)


# policy.train_global_batch_size: two optimiser steps a batch


def test_two_optimiser_steps_share_the_groups_and_the_denominators(make, monkeypatch):
    trainer = make(half_right, policy={"train_global_batch_size": 8})
    seen = []
    update = trainer.parts.policy.update

    def watched(sequences, *args, **keys):
        result = update(sequences, *args, **keys)
        seen.append((sequences, result))
        return result

    monkeypatch.setattr(trainer.parts.policy, "update", watched)
    metrics = trainer.step().metrics
    assert metrics["policy/version"] == 2
    prompts = [{tuple(sequence.prompt_ids) for sequence in sequences} for sequences, _ in seen]
    assert [len(sequences) for sequences, _ in seen] == [8, 8]
    assert [len(part) for part in prompts] == [2, 2]
    assert not prompts[0] & prompts[1]
    # Each divides by its own 8 sequences.
    assert {sequence.policy_weight for sequences, _ in seen for sequence in sequences} == {1 / (WIDTH * 8)}
    # The denominators are those of before the first: it finds w = 1, the second a policy that has moved.
    assert np.abs(seen[0][1].terms.log_ratio).max() < 1e-4
    assert np.abs(seen[1][1].terms.log_ratio).max() > 1e-3
    # policy/loss is their mean: -(S1 + S2) / (2 * 96 * 8) with S1 + S2 = 10, but for what the policy has moved.
    assert metrics["policy/loss"] == pytest.approx(-10 / (2 * WIDTH * 8), rel=0.1)
    assert metrics["ratio_fresh/max"] == pytest.approx(np.exp(seen[1][1].terms.log_ratio.max()), rel=1e-5)
