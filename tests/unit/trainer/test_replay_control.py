"""Schedule, return of retired questions, guards and freshness through `Trainer.step`, rollouts from a script.

B = 4 questions, K = 4 answers, rho = 0.5, one optimiser step a step. With seed 10 the first twelve questions stand in
line as 6 4 2 12 | 9 5 7 11 | 3 8 1 10. A wrong answer of a question has the same number of tokens for every question,
because i + 50 has two digits.
"""

import numpy as np
import pytest
from scripted import (
    all_wrong,
    build_trainer,
    fresh_ids,
    half_right,
    logprobs_at_ratio,
    plant,
    replayed_members,
    right,
    token_ids,
    wrong,
)

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.algorithm.guards import Guards
from exgrpo_megatron.config import GuardsConfig


@pytest.fixture
def make(tmp_path, data_parallel):
    def made(script=all_wrong, **sections):
        return build_trainer(tmp_path, script, comm=data_parallel, **sections)

    return made


def steps(trainer, count):
    return [trainer.step() for _ in range(count)]


def column(results, name):
    return [result.metrics[name] for result in results]


def all_right(question_id, samples):
    return [right(question_id)] * samples


# experience.start_step, start_epoch, stop_pass_rate, replay_probability


@pytest.mark.parametrize(
    ("start", "replay_on"), [({"start_step": 3}, [0, 0, 1, 1, 1]), ({"start_epoch": 1}, [0, 0, 0, 1, 1])]
)
def test_replay_starts_with_its_step_or_with_the_second_epoch(make, start, replay_on):
    # Twelve questions, four a step: the fourth step is the first of epoch 1.
    results = steps(make(half_right, experience={"start_pass_rate": None, **start}), 5)
    assert column(results, "experience/replay_on") == replay_on
    assert column(results, "experience/replayed_questions") == [2 * on for on in replay_on]


def test_replay_goes_off_below_the_stop_and_on_again_above_the_start(make):
    good = 0

    def script(question_id, samples):
        return [*[right(question_id)] * good, *[wrong(question_id)] * 4][:samples]

    trainer = make(script, experience={"start_pass_rate": 0.4, "stop_pass_rate": 0.1})
    found = []
    for right_of_four in (2, 1, 0, 1, 2, 2):
        good = right_of_four
        found.append(trainer.step().metrics)
    # .5 turns on; .25 stays; 0 turns off, although the stored answers of the step's replayed groups, 2 of 16, make
    # .125 of all its answers right; .25 stays off; .5 turns on.
    assert [metrics["experience/replay_on"] for metrics in found] == [0, 1, 1, 0, 0, 1]
    assert found[2]["reward/pass_rate"] == 2 / 16


def test_steps_that_the_probability_leaves_out_are_on_policy(make):
    trainer = make(half_right, experience={"replay_probability": 0.3}, loss_fn={"old_logprobs": "engine"})
    trainer.parts.engine.recorder = lambda question, ids: logprobs_at_ratio(trainer, question, ids, 0.5)
    results = steps(trainer, 8)
    drawn = [np.random.default_rng(stable_seed(10, step, "replay")).random() < 0.3 for step in range(1, 9)]
    assert 1 <= sum(drawn[1:]) < 7
    assert column(results, "experience/replay_on") == drawn
    for on, result in zip(drawn[1:], results[1:], strict=True):
        assert len(replayed_members(result.groups)) == 2 * on
        # New tokens have w = 0.5: the clip, which the mixed phase is without, takes those of wrong answers.
        assert (result.metrics["policy/clip_share"] > 0) is not on


# experience.return_retired


def test_retired_questions_are_sampled_again_and_replayed_once_they_have_an_answer(make):
    visits = {}

    def easy_at_first(question_id, samples):
        visits[question_id] = visits.get(question_id, 0) + 1
        return (all_right if visits[question_id] == 1 else half_right)(question_id, samples)

    trainer = make(easy_at_first, num_questions=40, experience={"return_retired": {"share": 0.5, "period": 2}})
    results = steps(trainer, 2)
    # Eight are retired, and half of them come back after step 2, to be new in this epoch.
    assert column(results, "experience/returned_this_step") == [0, 4]
    assert column(results, "experience/retired") == [4, 4]
    told = {event.question_id for event in results[1].events if event.kind == "returned"}
    assert (results[1].metrics["experience/returned"], results[1].metrics["data/questions_left"]) == (4, 36)
    tried = {name for result in results for name in fresh_ids(result)}
    back = tried - trainer.parts.experience.retired
    assert len(back) == 4
    assert told == back
    line = trainer.parts.order.state_dict()["line"]
    assert len(line) == 32 + 4
    assert back == tried & set(line)
    returned = set()
    while not returned:
        returned = back & set(fresh_ids(trainer.step()))
    # Half right the second time: stored, and drawn from then on.
    assert all(trainer.parts.experience.count(name) == 2 for name in returned)
    assert set(replayed_members(trainer.step().groups)) & back


def test_who_is_brought_back_depends_on_seed_and_step_alone_and_at_least_one_is(make):
    names = []
    for script in (all_right, lambda name, samples: all_right(name, samples)[::-1]):
        trainer = make(script, num_questions=40, experience={"return_retired": {"share": 0.01, "period": 1}})
        first = trainer.step()
        assert first.metrics["experience/returned_this_step"] == 1
        names.append(set(fresh_ids(first)) - trainer.parts.experience.retired)
    assert names[0] == names[1]


def test_where_only_replay_is_left_a_returned_question_keeps_its_place_among_the_new(make):
    returning = {"retire_from": "replay", "return_retired": {"share": 1.0, "period": 1}}
    trainer = make(all_right, experience=returning)
    results = steps(trainer, 3)
    assert [sorted(fresh_ids(result)) for result in results] == [
        sorted(f"q{i}" for i in numbers) for numbers in ((6, 4, 2, 12), (9, 5, 7, 11), (3, 8, 1, 10))
    ]
    assert column(results, "experience/returned") == [4, 8, 12]
    assert column(results, "experience/retired") == [0, 0, 0]


def test_what_another_recipe_retired_comes_back_after_a_resume_where_nothing_retires(make, tmp_path, caplog):
    first = make(all_right, num_questions=30)
    retired = {group.question.id for group in first.step().groups}
    assert (len(retired), first.parts.order.num_active) == (4, 26)
    first.parts.experience.snapshot().save(tmp_path / "experience")
    trainer = make(all_wrong, num_questions=30, experience={"retire_from": "never"})
    trainer.parts.experience.load(tmp_path / "experience")
    trainer.load_state_dict(first.state_dict())
    assert "4 questions that were retired come back: experience.retire_from is 'never' now" in caplog.text
    assert trainer.parts.order.num_active == 30
    results = steps(trainer, 2)
    assert column(results, "experience/retired") == [0, 0]
    returned = [[event.question_id for event in result.events if event.kind == "returned"] for result in results]
    assert returned == [sorted(retired), []]


# experience.guards


def guarded(make, *, ratios=(5.0, 1.0), script=all_wrong, loss_fn=None, **guards):
    """q1 and q3 are stored, with such ratios, and both are replayed in every step that replays; nothing else is ever
    stored, because every new answer is wrong."""
    trainer = make(script, experience={"guards": guards}, loss_fn={"entropy_coeff": 0.0, **(loss_fn or {})})
    for name, ratio in zip(("q1", "q3"), ratios, strict=True):
        plant(trainer, name, [right(name)], ratio=ratio)
    return trainer


# Both answers have as many tokens. Of w = 5 and 5: k3 = 5 - 1 - ln 5 = 2.3906. Of w = 4 and 1: effective sample size
# 5^2 / (2 x 17) = .7353.
@pytest.mark.parametrize(
    ("limit", "ratios", "passes", "fails"),
    [
        ("max_ratio_replayed", (5.0, 1.0), 5.01, 4.99),
        ("max_kl_replayed", (5.0, 5.0), 2.392, 2.389),
        ("min_ess_replayed", (4.0, 1.0), 0.7345, 0.7361),
    ],
)
def test_limits_of_replayed_tokens_by_hand(make, limit, ratios, passes, fails):
    result = guarded(make, ratios=ratios, **{limit: fails}).step()
    assert result.metrics["guards/crossed"] == 1
    assert any("guard of replay crossed" in text and limit in text for text in result.warnings)
    assert not Guards(GuardsConfig(**{limit: passes})).crossed(result.metrics)


# Step 1 has 3 new answers each of q1 and q3, and 4 each of q6 and q4. With w = 4 for the latter and 1 for the others:
# (32 + 6)^2 / (14 x (8 x 16 + 6)) = 1444 / 1876 = .7697; k3 = 8 (3 - ln 4) / 14 = .9221.
@pytest.mark.parametrize(
    ("limit", "passes", "fails"),
    [("max_ratio_fresh", 4.01, 3.99), ("max_kl_fresh", 0.923, 0.921), ("min_ess_fresh", 0.769, 0.7705)],
)
def test_limits_of_new_tokens_by_hand(make, limit, passes, fails):
    trainer = guarded(make, loss_fn={"old_logprobs": "engine"}, **{limit: fails})
    trainer.parts.engine.recorder = lambda question, ids: logprobs_at_ratio(
        trainer, question, ids, 4.0 if question.id in ("q6", "q4") else 1.0
    )
    metrics = trainer.step().metrics
    assert metrics["guards/crossed"] == 1
    assert not Guards(GuardsConfig(**{limit: passes})).crossed(metrics)


def test_steps_without_replay_are_not_looked_at(make):
    trainer = make(
        experience={"start_pass_rate": None, "start_step": 2, "guards": {"max_ratio_fresh": 2.0}},
        loss_fn={"old_logprobs": "engine"},
    )
    trainer.parts.engine.recorder = lambda question, ids: logprobs_at_ratio(trainer, question, ids, 3.0)
    assert column(steps(trainer, 2), "guards/crossed") == [0, 1]


def test_a_warning_changes_nothing_about_the_steps(make):
    limit = {"max_ratio_replayed": 4.0}
    for guards in (limit, {}):
        trainer = guarded(make, **guards)
        results = steps(trainer, 3)
        weights = {name: tensor.numpy().tobytes() for name, tensor in trainer.parts.policy.export_weights()}
        found = (column(results, "policy/loss"), weights)
        if guards:
            assert column(results, "guards/crossings") == [1, 2, 3]
            expected = found
    assert found == expected


def test_the_fall_back_replays_nothing_for_as_many_steps(make):
    trainer = guarded(make, max_ratio_replayed=4.0, action="on_policy", hold_steps=2)
    results = steps(trainer, 5)
    assert column(results, "experience/replay_on") == [1, 0, 0, 1, 0]
    assert column(results, "experience/replayed_questions") == [2, 0, 0, 2, 0]
    assert column(results, "guards/held") == [0, 1, 1, 0, 1]
    assert column(results, "guards/crossings") == [1, 1, 1, 2, 2]
    (warning,) = (text for text in results[0].warnings if "guard" in text)
    assert "Steps 2 to 3 replay nothing" in warning


def test_the_clip_caps_replayed_tokens_and_clips_new_ones(make):
    trainer = guarded(make, max_ratio_replayed=4.0, action="clip", hold_steps=2, loss_fn={"old_logprobs": "engine"})
    trainer.parts.engine.recorder = lambda question, ids: logprobs_at_ratio(trainer, question, ids, 0.5)
    first, second = steps(trainer, 2)
    answer, mistake = len(token_ids(trainer, right("q1"))), len(token_ids(trainer, wrong("q1")))
    assert column([first, second], "guards/capped_tokens") == [0, answer]  # q1's, at w = 5; q3's are at w = 1
    # New tokens have w = 0.5, and advantages of -.25 beside a stored answer (6 of 14), else of 0. Clipped, they have
    # the loss of .8.
    assert column([first, second], "policy/clip_share") == [0, pytest.approx(6 / 14)]
    # k = 1 of 4: the stored answer has .75. f(w) = w / (w + .1); width 91 x 16 sequences. q3's w is 1 but for what the
    # first step moved.
    width = trainer.config.policy.generation.max_new_tokens * 16
    of_new = 6 * mistake * 0.25
    of_first = (of_new * 0.5 - answer * 0.75 * (5 / 5.1 + 1 / 1.1)) / width
    of_second = (of_new * 0.8 - answer * 0.75 * (1 / 1.1)) / width
    assert first.metrics["policy/loss"] == pytest.approx(of_first, rel=1e-3)
    assert second.metrics["policy/loss"] == pytest.approx(of_second, rel=2e-2)


def test_a_cap_of_its_own_and_holds_that_go_on_while_the_limit_is_crossed(make):
    trainer = guarded(make, max_ratio_replayed=4.0, action="clip", hold_steps=1, ratio_cap=0.5)
    results = steps(trainer, 3)
    answer = len(token_ids(trainer, right("q1")))
    assert column(results, "guards/held") == [0, 1, 1]
    assert column(results, "guards/capped_tokens") == [0, 2 * answer, 2 * answer]
    assert column(results, "experience/replay_on") == [1, 1, 1]


# Replay steps


def with_replay_steps(make, **experience):
    """q1 at w = 5 and q3 at w = 1 are stored, and both are trained on in every replay step."""
    trainer = make(experience={"strategy": "replay_step", "start_pass_rate": None, **experience})
    for name, ratio in (("q1", 5.0), ("q3", 1.0)):
        plant(trainer, name, [right(name)], ratio=ratio)
    return trainer


def test_replay_steps_are_guarded_too(make):
    guards = {"max_ratio_replayed": 4.0, "action": "on_policy", "hold_steps": 2}
    results = steps(with_replay_steps(make, guards=guards), 4)
    assert column(results, "replay_step/answers") == [2, 0, 0, 2]
    assert column(results, "experience/replay_on") == [1, 0, 0, 1]
    assert any("guard of replay crossed: ratio_replay_step/max = 5" in text for text in results[0].warnings)
    trainer = with_replay_steps(make, guards={"max_ratio_replayed": 4.0, "action": "clip", "ratio_cap": 3.0})
    # The first replay step moved w of q3 to little above 1.2.
    assert column(steps(trainer, 2), "guards/capped_tokens") == [0, len(token_ids(trainer, right("q1")))]


def test_replay_steps_follow_the_probability_and_age_and_use_their_answers(make):
    results = steps(with_replay_steps(make, replay_probability=0.3), 5)
    drawn = [np.random.default_rng(stable_seed(10, step, "replay")).random() < 0.3 for step in range(1, 6)]
    assert column(results, "replay_step/answers") == [2 * on for on in drawn]
    # Two answers, planted before the run: each replay step uses both.
    assert column(results, "freshness/uses_per_answer") == np.cumsum(drawn).tolist()
    for step, (on, result) in enumerate(zip(drawn, results, strict=True), 1):
        assert result.metrics.get("freshness/age_steps_max") == (step if on else None)


# Freshness and alarms


def test_freshness_of_replay_by_hand(make):
    # Two of a question's answers are right, and the same each time: of the three new ones of a replayed question two
    # are right and were stored.
    results = steps(make(half_right), 3)
    assert column(results, "freshness/duplicates") == [0, 4 / 8, 4 / 8]
    assert column(results, "freshness/uses_per_answer") == [0, 2 / 12, 4 / 16]
    assert column(results[1:2], "freshness/age_steps_median") == [1]
    assert column(results[1:2], "freshness/age_steps_max") == [1]
    # Step 1 stored what weights 0 wrote; step 2 begins with weights 1.
    assert column(results[1:2], "freshness/age_versions_mean") == [1]
    before, now = (set(replayed_members(result.groups)) for result in results[1:])
    assert column(results[1:], "freshness/repeated") == [0, len(before & now) / 2]
    assert column(results, "freshness/data_left") == [1, 1, 1]


def test_drain_alarms_ring_once(make):
    trainer = make(all_right, experience={"alarms": {"average_steps": 2}})
    results = steps(trainer, 4)
    assert column(results[:3], "freshness/data_left") == pytest.approx([8 / 12, 4 / 12, 0])
    # Step 2: four left at four a step. An epoch keeps its twelve questions, no more than a batch and twenty.
    assert "freshness/steps_left" not in results[0].metrics
    assert results[1].metrics["freshness/steps_left"] == 1
    assert results[1].metrics["freshness/epochs_left"] == pytest.approx(4 / 12)
    assert column(results, "alarm/drain_before_end") == [0, 1, 1, 1]
    assert column(results, "alarm/min_data_left") == [0, 0, 1, 1]
    told = [[text for text in result.warnings if "experience.alarms" in text] for result in results]
    assert [len(texts) for texts in told] == [0, 1, 1, 0]
    assert "freshness/steps_left = 1 is below the 48 steps left in the run" in told[1][0]
    assert "freshness/data_left = 0 is below experience.alarms.min_data_left = 0.2" in told[2][0]


def test_without_experience_there_is_nothing_of_this(make):
    metrics = make(half_right, experience={"enabled": False}).step().metrics
    assert not [name for name in metrics if name.startswith(("freshness/", "alarm/", "guards/"))]
