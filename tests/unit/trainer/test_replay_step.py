r"""The replay step (`experience.strategy`, `experience.replay_step`) through `Trainer.step`: loss, gradient, counts.

Unless a test says otherwise: B = 4 questions, K = 4 answers, responses of at most 96 tokens, no entropy bonus, no
weight decay, and nobody answers right, so that updates on new answers change nothing and a planted answer still has the
ratio it was planted with. Seed 10 puts q6 q4 q2 q12 first. Right answers of q1 to q8, such as `\boxed{2}`, have 4
tokens with the EOS. A planted answer comes with a group of four of which k are right: the running pass rate begins with
k/4.
"""

import numpy as np
import pytest
import torch
from scripted import all_wrong, build_trainer, half_right, make_config, plant, replayed_members, right, token_ids

from exgrpo_megatron.errors import ConfigError

WIDTH = 96


def with_steps(keys=None, **experience):
    return {"strategy": "replay_step", "replay_step": keys or {}, **experience}


@pytest.fixture
def make(tmp_path, data_parallel):
    """A trainer whose engine follows a script; `keys` are those of `experience.replay_step`."""

    def build(keys=None, *, script=all_wrong, experience=None, loss_fn=None, optimizer=None, **sections):
        policy = {"megatron_cfg": {"optimizer": {"lr": 1e-4, "weight_decay": 0.0, **(optimizer or {})}}}
        return build_trainer(
            tmp_path,
            script,
            comm=data_parallel,
            experience=with_steps(keys, **(experience or {})),
            loss_fn={"entropy_coeff": 0.0, **(loss_fn or {})},
            policy={**policy, **sections.pop("policy", {})},
            **sections,
        )

    return build


def plant_two(trainer):
    """q1 with one right of four and w = 1, q3 with two and w = 0.1; neither is among the new questions of step 1."""
    plant(trainer, "q1", [right("q1")])
    plant(trainer, "q3", [right("q3")], k=2, ratio=0.1)


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.parts.policy.export_weights()}


# weight, shaping, loss_fn.normalizer


@pytest.mark.parametrize(
    ("keys", "q1", "q3", "push"),
    [
        # Weights 3/4 and 1/2; g(1) = 1.1^2 / 0.1 / 1.1 = 11, g(.1) = 6.05, whose pushes are 1 and 3.025.
        ({}, 0.75 * 11, 0.5 * 6.05, (1 + 3.025) / 2),
        ({"weight": "one"}, 11, 6.05, (1 + 3.025) / 2),
        # b = 1: 4 w / (w + 1), pushes 4 w / (w + 1)^2.
        ({"shaping_beta": 1.0}, 0.75 * 2, 0.5 * 0.4 / 1.1, (1 + 0.4 / 1.21) / 2),
        ({"shaping": "ratio"}, 0.75 / 1.1, 0.5 / 2, (0.1 / 1.21 + 0.25) / 2),
        ({"shaping": "none"}, 0.75, 0.5 * 0.1, 0.55),
        ({"shaping": "sqrt"}, 0.75, 0.5 * 0.1**0.5, (0.5 + 0.1**0.5 / 2) / 2),
        ({"shaping": "clip"}, 0.75, 0.5 * 0.1, 0.55),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_loss_is_the_weighted_shaped_ratio_over_the_longest_response_and_the_answers(make, keys, q1, q3, push):
    trainer = make(keys)
    plant_two(trainer)
    metrics = trainer.step().metrics
    assert metrics["replay_step/loss"] == pytest.approx(-4 * (q1 + q3) / (WIDTH * 2), rel=1e-3)
    assert metrics["replay_step/mean_push"] == pytest.approx(push, rel=1e-3)
    assert metrics["replay_step/mean_weight"] == (1.0 if "weight" in keys else 0.625)
    assert metrics["ratio_replay_step/min"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["ratio_replay_step/max"] == pytest.approx(1.0, rel=1e-3)
    assert metrics["policy/loss"] == metrics["policy/grad_norm"] == 0
    assert "ratio_replayed/p50" not in metrics


def test_log_probs_are_pushed_alike_whatever_their_ratio(make):
    trainer = make({"shaping": "log_prob"})
    plant_two(trainer)
    pairs = [(trainer.questions[name].prompt_ids, token_ids(trainer, right(name))) for name in ("q1", "q3")]
    q1, q3 = (float(score.logprobs.sum()) for score in trainer.parts.policy.score(pairs, 1.0))
    metrics = trainer.step().metrics
    assert metrics["replay_step/loss"] == pytest.approx(-(0.75 * q1 + 0.5 * q3) / (WIDTH * 2), rel=1e-4)
    assert metrics["replay_step/mean_push"] == 1


def test_per_answer_length_divides_by_the_answers_own_tokens(make):
    trainer = make(loss_fn={"normalizer": "per_answer_length"})
    plant_two(trainer)
    # 4 tokens in each answer, so the mean over answers of weight x g.
    assert trainer.step().metrics["replay_step/loss"] == pytest.approx(-(0.75 * 11 + 0.5 * 6.05) / 2, rel=1e-3)


def test_global_tokens_divides_by_the_tokens_of_all_answers(make):
    trainer = make(loss_fn={"normalizer": "global_tokens"})
    plant_two(trainer)
    # 8 tokens in all, 4 of each: again the mean.
    assert trainer.step().metrics["replay_step/loss"] == pytest.approx(-4 * (0.75 * 11 + 0.5 * 6.05) / 8, rel=1e-3)


# Independent implementation


def test_loss_and_gradient_norm_are_those_of_the_step_written_down_in_plain_torch(make):
    from transformers import Qwen2ForCausalLM

    trainer = make({"size": 1.0}, policy={"train_micro_batch_size": 3})
    ratios = {"q1": 1.0, "q3": 0.1, "q5": 3.0, "q7": 0.01, "q8": 1.3, "q9": 0.7, "q10": 0.2}
    for number, (name, ratio) in enumerate(ratios.items()):
        plant(trainer, name, [right(name, number % 3)], k=1 + number % 3, ratio=ratio)
    rows = [
        (trainer.questions[name], trainer.parts.experience.answers(name)[0], (1 + number % 3) / 4)
        for number, name in enumerate(ratios)
    ]
    model = Qwen2ForCausalLM.from_pretrained(trainer.parts.model_dir, dtype=torch.float32)
    loss = torch.zeros(())
    for question, answer, pass_rate in rows:
        ids = torch.tensor(np.concatenate([question.prompt_ids, answer.token_ids]), dtype=torch.long)
        log_probs = model(ids[None]).logits[0, len(question.prompt_ids) - 1 : -1].log_softmax(-1)
        new = log_probs.gather(1, ids[len(question.prompt_ids) :, None]).squeeze(1)
        w = (new - torch.tensor(answer.logprobs)).exp()
        loss = loss - ((1 - pass_rate) * 1.1**2 / 0.1 * w / (w + 0.1)).sum() / (WIDTH * len(rows))
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    metrics = trainer.step().metrics
    assert metrics["replay_step/answers"] == 7
    assert metrics["replay_step/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["replay_step/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


# size, num_steps, start; what is drawn


@pytest.mark.parametrize(("size", "answers"), [(2.0, 7), (0.25, 4), (0.2, 3), (0.0625, 1), (0.4375, 7)])
def test_the_answers_are_size_times_b_times_k_rounded_down_or_all_there_are(make, size, answers):
    # B x K = 16; 7 questions are stored, some with two answers, of which one is trained on.
    trainer = make({"size": size})
    for number in (1, 3, 5, 7, 8, 9, 10):
        plant(trainer, f"q{number}", [right(f"q{number}"), right(f"q{number}", 1)][: 1 + number % 2])
    metrics = trainer.step().metrics
    assert metrics["replay_step/answers"] == answers
    assert metrics["budget/stored_answers"] == answers
    assert metrics["experience/replayed_questions"] == 0
    assert metrics["experience/scored_answers"] == 0  # chosen at random


def test_the_running_pass_rate_goes_by_new_answers_and_decays(make):
    # q6 is planted with 1/4 and new in step 1, where nobody is right: 1/4 x 1/2, or x 0.2.
    for decay, rate in ((0.5, 0.125), (0.2, 0.05)):
        trainer = make({"pass_rate_decay": decay})
        plant(trainer, "q6", [right("q6")])
        assert trainer.step().metrics["replay_step/mean_weight"] == pytest.approx(1 - rate)


def test_an_answer_is_trained_on_in_the_step_that_stores_it(make):
    # Two of four right in each of four groups: weight 1/2, eight answers stored, one each of four questions trained on.
    metrics = make(script=half_right).step().metrics
    assert metrics["experience/stored_this_step"] == 8
    assert (metrics["replay_step/answers"], metrics["replay_step/mean_weight"]) == (4, 0.5)
    assert metrics["replay_step/mean_age_steps"] == 0
    # What was just generated has w = 1, but for the update on new answers that came before.
    assert 0.9 < metrics["ratio_replay_step/p50"] < 1.1


def test_a_step_with_nothing_stored_has_no_replay_step_and_the_schedule_waits(make):
    scheduler = {"lr_decay_style": "linear", "lr_decay_iters": 10}
    megatron = {"optimizer": {"lr": 1e-4, "weight_decay": 0.0}, "scheduler": scheduler}
    trainer = make({"num_steps": 2}, policy={"megatron_cfg": megatron})
    assert trainer.config.total_updates == 50 * 3
    empty = trainer.step().metrics
    assert (empty["replay_step/answers"], empty["replay_step/updates"], empty["policy/version"]) == (0, 0, 1)
    assert (empty["experience/replay_on"], empty["policy/learning_rate"]) == (0, pytest.approx(1e-4))
    assert "replay_step/loss" not in empty
    plant(trainer, "q1", [right("q1")])
    full = trainer.step().metrics
    # One optimiser step before; then one on new answers and two replay steps, at 0.9, 0.8 and 0.7 of the rate.
    assert (full["replay_step/updates"], full["policy/version"], full["experience/replay_on"]) == (2, 4, 1)
    assert full["policy/learning_rate"] == pytest.approx(0.9e-4)
    assert full["replay_step/learning_rate"] == pytest.approx(0.7e-4)
    assert full["budget/optimizer_steps"] == 4


@pytest.mark.parametrize(("start", "updates"), [(None, [1, 1]), (0.49, [0, 1]), (0.5, [0, 0])])
def test_replay_steps_wait_for_a_pass_rate_strictly_above_the_start(make, start, updates):
    trainer = make({"start_pass_rate": start}, script=half_right)
    assert [trainer.step().metrics["replay_step/updates"] for _ in range(2)] == updates


def test_a_replay_step_with_too_large_a_norm_is_skipped_and_counted(make):
    trainer = make(policy={"skip_grad_norm_above": 1e-6})
    plant_two(trainer)
    before = weights_of(trainer)
    result = trainer.step()
    assert result.metrics["replay_step/skipped_updates"] == 1
    assert result.metrics["policy/skipped_updates"] == 0
    assert result.metrics["policy/version"] == result.metrics["budget/optimizer_steps"] == 1
    assert trainer.skipped_updates == 1
    assert any("1 of 2 optimiser steps skipped, 1 so far" in text for text in result.warnings)
    assert all(bool((tensor == before[name]).all()) for name, tensor in weights_of(trainer).items())


def test_the_learning_rate_of_replay_steps_alone_is_multiplied(make):
    def change(multiplier):
        trainer = make({"lr_multiplier": multiplier})
        plant_two(trainer)
        before = weights_of(trainer)
        metrics = trainer.step().metrics
        assert metrics["policy/learning_rate"] == pytest.approx(1e-4)
        assert metrics["replay_step/learning_rate"] == pytest.approx(multiplier * 1e-4)
        return torch.cat([(tensor - before[name]).flatten() for name, tensor in weights_of(trainer).items()])

    # Adam's second step: the change is in proportion to the rate.
    torch.testing.assert_close(change(0.5), 0.5 * change(1.0), rtol=1e-2, atol=1e-7)


# joint, both, retire_from


def test_joined_answers_add_their_loss_and_gradient_to_the_update_on_new_ones(make):
    trainer = make({"joint": True})
    plant_two(trainer)
    metrics = trainer.step().metrics
    apart = make()
    plant_two(apart)
    expected = apart.step().metrics
    # New answers have none of either here.
    assert metrics["policy/loss"] == pytest.approx(expected["replay_step/loss"], rel=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(expected["replay_step/grad_norm"], rel=1e-5)
    assert (metrics["replay_step/answers"], metrics["replay_step/updates"], metrics["policy/version"]) == (2, 0, 1)
    assert metrics["experience/drawable_questions"] == 2
    assert "ratio_replayed/min" in metrics
    assert "ratio_replayed/shaped" not in metrics  # f(w) has no part in the loss
    assert metrics["replay_step/mean_push"] == pytest.approx(expected["replay_step/mean_push"], rel=1e-5)

    def one_right(name, samples):
        return [right(name), *["\\boxed{0}"] * (samples - 1)]

    new = [question.id for question in make(num_questions=8).parts.order.take(4)]
    first, second, *_ = (name for name in trainer.questions if name not in {*new, "q9", "q10", "q11", "q12"})
    trainer = make({"joint": True}, script=one_right, num_questions=8)
    plant(trainer, first, [right(first)])
    plant(trainer, second, [right(second)], k=2, ratio=0.1)
    # New answers: 3/4 on 4 tokens against 1/4 on 12 make 0. Their four right ones are stored, of weight 3/4 and w = 1.
    metrics = trainer.step().metrics
    assert metrics["policy/loss"] == pytest.approx(-4 * (5 * 0.75 * 11 + 0.5 * 6.05) / (WIDTH * 6), rel=1e-3)


def test_both_replays_in_groups_and_in_a_step_of_its_own(make):
    trainer = make(experience={"strategy": "both"}, script=half_right)
    plant_two(trainer)
    metrics = trainer.step().metrics
    assert metrics["experience/replayed_questions"] == 2
    # q1, q3 and two new questions are stored by the time of the replay step.
    assert (metrics["replay_step/answers"], metrics["budget/stored_answers"]) == (4, 6)
    assert metrics["budget/answers"] == 2 * 4 + 2 * 3
    assert metrics["policy/version"] == 2


def test_under_the_replay_step_all_questions_are_new(make):
    trainer = make(script=half_right)
    plant_two(trainer)
    results = [trainer.step() for _ in range(2)]
    assert not any(replayed_members(result.groups) for result in results)
    metrics = results[-1].metrics
    assert metrics["budget/answers"] == 32
    assert metrics["budget/tokens"] == sum(result.metrics["rollout/tokens"] for result in results)
    assert metrics["experience/replayed_questions"] == 0


@pytest.mark.parametrize(("retire_from", "retired"), [(None, 0), ("never", 0), ("replay", 4), ("replay_and_fresh", 4)])
def test_a_question_solved_by_all_is_stored_in_the_last_bucket_unless_it_is_retired(make, retire_from, retired):
    def all_right(name, samples):
        return [right(name, number % 2) for number in range(samples)]

    trainer = make(script=all_right, num_questions=30, experience={"retire_from": retire_from})
    metrics = trainer.step().metrics
    assert trainer.config.experience.retire_from == (retire_from or "never")
    assert metrics["experience/retired"] == retired
    assert metrics["experience/bucket_3"] == 4 - retired
    assert metrics["experience/stored_answers"] == (0 if retired else 8)
    assert metrics["data/questions_left"] == (26 if retire_from == "replay_and_fresh" else 30)
    # A pass rate of 1 weighs 0: the step is there, and has no gradient.
    if not retired:
        assert (metrics["replay_step/answers"], metrics["replay_step/grad_norm"]) == (4, 0)


def test_never_keeps_a_solved_question_under_the_literal_method_too(make):
    experience = {"strategy": "exgrpo", "retire_from": "never"}
    trainer = make(script=lambda name, samples: [right(name)] * samples, experience=experience)
    metrics = trainer.step().metrics
    assert (metrics["experience/retired"], metrics["experience/bucket_3"]) == (0, 4)


# Keys that would do nothing


@pytest.mark.parametrize(
    ("experience", "message"),
    [
        ({"replay_step": {"size": 1.0}}, r"replay_step\.size = 1\.0 has no effect with .*strategy = 'exgrpo'"),
        (with_steps(replay_ratio=0.25), r"replay_ratio = 0\.25 has no effect .* set it back to 0\.5"),
        (with_steps(start_pass_rate=0.2), r"start_pass_rate = 0\.2 .*experience\.replay_step\.start_pass_rate in its"),
        (with_steps(answer_choice="random"), r"answer_choice = 'random' .*experience\.replay_step\.answer_choice in"),
        (with_steps(shaping="none"), r"experience\.shaping = 'none' has no effect"),
        (with_steps({"shaping": "sqrt", "shaping_beta": 0.2}), r"shaping_beta = 0\.2 has no effect with .* 'sqrt'"),
        (with_steps({"weight": "one", "pass_rate_decay": 0.2}), r"pass_rate_decay = 0\.2 has no effect with weight"),
        (with_steps({"bucket_weight": "uniform", "bucket_sigma": 2.0}), r"bucket_sigma = 2\.0 has no effect with"),
        (with_steps({"joint": True, "num_steps": 2}), r"num_steps = 2 has no effect with joint = true"),
        (with_steps({"joint": True, "lr_multiplier": 2.0}), r"lr_multiplier = 2\.0 has no effect with joint = true"),
        (with_steps({"joint": True}, strategy="both"), r"joint = true with experience\.strategy = 'both'"),
        (with_steps({"size": 0.05}), r"size = 0\.05 times .* = 16 is less than one answer"),
        ({"bucket_weight": "linear", "bucket_sigma": 2.0}, r"bucket_sigma = 2\.0 has no effect with bucket_weight"),
        ({"shaping": "clip", "shaping_beta": 0.2}, r"shaping_beta = 0\.2 has no effect with shaping = 'clip'"),
    ],
)  # fmt: skip
def test_keys_that_would_do_nothing_are_refused_by_name(tmp_path, experience, message):
    with pytest.raises(ConfigError, match=message):
        make_config(tmp_path, experience=experience)


def test_a_step_that_depends_on_ranks_or_has_two_updates_to_join_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"normalizer = 'rank_width' with experience\.strategy = 'both'"):
        make_config(tmp_path, variant="code", experience={"strategy": "both"})
    joint, bonus = with_steps({"joint": True}), {"entropy_bonus": "per_micro_batch"}
    with pytest.raises(ConfigError, match=r"entropy_bonus = 'per_micro_batch' with experience\.replay_step\.joint"):
        make_config(tmp_path, experience=joint, loss_fn=bonus)
    with pytest.raises(ConfigError, match="joint = true, but a step has 2 optimiser steps"):
        make_config(tmp_path, experience=with_steps({"joint": True}), policy={"train_global_batch_size": 8})


def test_a_size_that_is_rounded_down_to_no_answer_is_refused(tmp_path):
    # As a decimal the product is 0.9999999999999999; that of the floats is 1.
    sections = {"grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 3}}
    policy = {"train_global_batch_size": 3}
    with pytest.raises(ConfigError, match=r"size = 0\.3333333333333333 times .* = 3 is less than one answer"):
        make_config(tmp_path, experience=with_steps({"size": 1 / 3}), policy=policy, **sections)
