"""`exgrpo simulate`: cases that can be worked out by hand, and a run that was logged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from exgrpo_megatron.errors import ConfigError, DataError
from exgrpo_megatron.experience.history import HISTORY_FILE, Event, HistoryWriter, read_history
from exgrpo_megatron.recipe import dump_recipe, load_recipe
from exgrpo_megatron.simulation.learner import Growth, Learner
from exgrpo_megatron.simulation.outcome import draw_outcome, summary, write_outcome
from exgrpo_megatron.simulation.rates import Rates, find_rates, fit_beta, fit_distinct
from exgrpo_megatron.simulation.run import Assumptions, not_simulated, record_bytes, simulate, simulated_config

ROOT = Path(__file__).resolve().parents[3]
NOTHING_LEARNED = Growth(0.0, 0.0, 0.0)


def recipe(*overrides):
    """B = 8, K = 4, four steps."""
    small = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=32")
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", [*small, "grpo.max_num_steps=4", *overrides])


def constant(rate, questions):
    return Rates(np.full(questions, float(rate)), f"constant:{rate}")


def column(run, name):
    return [record[name] for record in run.records]


def test_questions_always_right_are_retired_in_one_epoch_and_nothing_is_stored():
    run = simulate(recipe(), constant(1, 32), Assumptions(NOTHING_LEARNED))
    assert column(run, "experience/retired") == [8, 16, 24, 32]  # B a step, 32 questions
    assert column(run, "experience/stored_answers") == [0, 0, 0, 0]
    assert column(run, "experience/replay_on") == [0, 1, 1, 1]  # on after step 1, whose pass rate is 1 > 0.35
    assert column(run, "experience/replayed_questions") == [0, 0, 0, 0]
    # More than a batch and 20 questions always stay: 29 of 32.
    assert column(run, "data/questions_left") == [29, 29, 29, 29]
    assert summary(run)["epochs_of_new_questions"] == 1.0


def test_questions_never_right_store_nothing_and_replay_never_starts():
    run = simulate(recipe(), constant(0, 40), Assumptions(Growth()))
    for name in ("stored_answers", "buffer_questions", "retired", "replay_on"):
        assert column(run, f"experience/{name}") == [0, 0, 0, 0]
    assert run.true_rates == [0, 0, 0, 0]  # without a right answer there is no advantage to learn from
    found = summary(run)
    assert (found["replay_starts_at_step"], found["mean_replay_share"]) == (None, 0)
    assert found["epochs_of_new_questions"] == 32 / 40


def test_half_of_the_batch_is_replayed_from_the_first_step_whose_buffer_is_full_enough():
    run = simulate(recipe("experience.start_pass_rate=null"), constant(0.5, 200), Assumptions(NOTHING_LEARNED))
    replayed, stored = column(run, "experience/replayed_questions"), column(run, "experience/buffer_questions")
    assert replayed == [0, *(min(4, questions) for questions in stored[:-1])]
    assert stored[-1] > 8


def test_the_first_buckets_are_binomial():
    """1000 questions with p = 0.5, K = 4: 0.25, 0.375, 0.25 of them in buckets 1 to 3, within 4 deviations."""
    config = recipe("grpo.num_prompts_per_step=1000", "policy.train_global_batch_size=4000", "grpo.max_num_steps=1")
    run = simulate(config, constant(0.5, 1000), Assumptions(NOTHING_LEARNED))
    for k, share in ((1, 0.25), (2, 0.375), (3, 0.25)):
        assert abs(run.records[0][f"experience/bucket_{k}"] - 1000 * share) < 4 * (1000 * share * (1 - share)) ** 0.5


def test_distinct_right_answers_bound_what_is_stored():
    config = recipe("grpo.max_num_steps=12")
    alike = simulate(config, constant(0.5, 30), Assumptions(NOTHING_LEARNED, distinct=1))
    assert column(alike, "experience/stored_answers") == column(alike, "experience/buffer_questions")
    assert sum(column(alike, "experience/already_stored")) > 0


def test_the_limit_of_bytes_counts_answers_of_the_assumed_size():
    """10 answers of 1000 bytes fit into 10000, whatever a simulated one takes."""
    config = recipe("experience.max_bytes=10000")
    assert simulated_config(config, 1000).experience.max_bytes == 10 * record_bytes()
    run = simulate(config, constant(0.5, 100), Assumptions(NOTHING_LEARNED, answer_bytes=1000))
    assert column(run, "experience/stored_answers") == [10, 10, 10, 10]
    assert column(run, "experience/stored_bytes")[-1] == 10_000
    assert sum(column(run, "experience/evicted_of_bytes")) > 0


def test_training_raises_the_rates_of_its_questions_and_of_all():
    """Logit of 0.5 is 0. Question 0: a group of 4 new answers, +1; question 1: 3 new and a replayed one, 0.75 + 2; and
    all 8 of 8 answers of the step, so everywhere +0.5."""
    learner = Learner(np.array([0.5, 0.5, 0.5, 1.0, 0.0]), Growth(1.0, 2.0, 0.5))
    replayed = np.array([False] * 7 + [True])
    learner.train(np.array([0] * 4 + [1] * 4), replayed, group_size=4, answers_of_a_step=8)
    assert learner.logits[:3].tolist() == [1.5, 3.25, 0.5]
    assert learner.rates(np.array([3, 4])).tolist() == [1, 0]


def test_a_curve_is_followed_on_average_over_the_answers_of_a_step():
    learner = Learner(np.array([0.2, 0.5, 0.9, 1.0]), NOTHING_LEARNED, {3: 0.4})
    learner.follow(2, np.array([0, 1, 2]), [4, 4, 4])
    assert learner.rates(np.array([0, 1, 2])) == pytest.approx([0.2, 0.5, 0.9])
    learner.follow(3, np.array([0, 1, 2]), [4, 4, 3])
    assert np.average(learner.rates(np.array([0, 1, 2])), weights=[4, 4, 3]) == pytest.approx(0.4)
    assert learner.rates(np.array([3]))[0] == 1


def test_the_beta_distribution_is_found_again_from_counts():
    rng = np.random.default_rng(0)
    counts = np.bincount(rng.binomial(8, rng.beta(2.0, 3.0, size=200_000)), minlength=9)
    assert fit_beta(np.arange(9.0), counts) == pytest.approx((2.0, 3.0), rel=0.03)


def test_the_number_of_distinct_answers_is_found_from_what_was_stored():
    """100 questions with 3 right of 2 equally likely: 2 (1 - 1/8) = 1.75 different ones a question."""
    right, questions = np.array([1.0, 2.0, 3.0]), np.array([0.0, 0.0, 100.0])
    assert fit_distinct(right, questions, 175) == 2
    assert fit_distinct(right, questions, 300) is None


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The first 40 steps of a run of recipes/quickstart.yaml."""
    folder = tmp_path_factory.mktemp("logged")
    config = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["grpo.max_num_steps=40"])
    (folder / "recipe.yaml").write_text(dump_recipe(config))
    (folder / "metrics.jsonl").write_bytes((Path(__file__).parent / "quickstart_metrics.jsonl").read_bytes())
    return folder, config


def test_a_logged_run_is_predicted(logged):
    """Within what four seeds gave: share of replay equal from step 3 on; stored and retired questions within 15%
    of all questions, and bucket shares within a total variation of 0.3 from step 5 on."""
    folder, config = logged
    rates = find_rates(str(folder), 0, np.random.default_rng(0))
    assert (len(rates.values), rates.distinct) == (450, 2)
    run = simulate(config, rates, Assumptions(NOTHING_LEARNED, rates.distinct))
    real = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for ours, theirs in list(zip(run.records, real, strict=True))[4:]:
        assert ours["experience/replayed_questions"] == theirs["experience/replayed_questions"] == 16
        for name in ("experience/buffer_questions", "experience/retired"):
            assert abs(ours[name] - theirs[name]) <= 0.15 * 450
        shares = [np.array([step[f"experience/bucket_{k}"] for k in range(1, 8)]) for step in (ours, theirs)]
        ours_share, theirs_share = (bucket / bucket.sum() for bucket in shares)
        assert 0.5 * np.abs(ours_share - theirs_share).sum() <= 0.3


def test_a_history_says_how_the_first_counts_were_spread(logged, tmp_path):
    """Of 1000 first groups 500 have 2 of 8 right and 500 have 6: mean 0.5, variance 4 = 8 / 4 (1 + 7 r), r = 1/7, so
    a + b = 6."""
    shutil.copytree(logged[0], tmp_path / "run")
    HistoryWriter(tmp_path / "run" / HISTORY_FILE).write(
        1, [Event(f"q{i}", "tried", count=2 + 4 * (i % 2), of=8) for i in range(1000)]
    )
    assert "beta:3,3," in find_rates(str(tmp_path / "run"), 0, np.random.default_rng(0)).words


def test_equal_seeds_give_equal_runs():
    first, second = (simulate(recipe(), constant(0.4, 100), Assumptions()).records for _ in range(2))
    assert first == second
    assert first != simulate(recipe("grpo.seed=2"), constant(0.4, 100), Assumptions()).records


def test_pass_rates_come_from_files(tmp_path):
    rng = np.random.default_rng(0)
    table = tmp_path / "rates.jsonl"
    table.write_text('{"question": "a", "pass_rate": 0.25}\n{"question": "b", "pass_rate": 1}\n')
    assert find_rates(str(table), 0, rng).values.tolist() == [0.25, 1.0]
    measured = tmp_path / "step_000001.pass_rates.jsonl"
    rows = [{"question_id": f"q{i}", "num_correct": i % 5, "num_answers": 4} for i in range(200)]
    measured.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_rates(str(measured), 0, rng)
    assert len(found.values) == 200
    assert found.values.mean() == pytest.approx(0.5, abs=0.05)  # 0 to 4 right of 4, equally many each
    assert len(found.resized(1000, rng).values) == 1000


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("beta:1", "takes 2 numbers, found 1"),
        ("constant:1.5", "from 0 to 1"),
        ("beta:0,1", "above 0"),
        ("uniform:x", "are not numbers"),
        ("normal:1", "neither a distribution"),
    ],
)
def test_unknown_rates_are_refused(source, part):
    with pytest.raises(ConfigError, match=part):
        find_rates(source, 10, np.random.default_rng(0))


def test_a_rate_that_is_none_is_refused_with_its_line(tmp_path):
    table = tmp_path / "rates.jsonl"
    table.write_text('{"pass_rate": 0.5}\n{"pass_rate": 7}\n')
    with pytest.raises(DataError, match=r"line 2.*found 7"):
        find_rates(str(table), 0, np.random.default_rng(0))


@pytest.mark.parametrize("text", ["much", "new=x", "speed=1", "new=inf"])
def test_unknown_growth_is_refused(text):
    with pytest.raises(ConfigError, match="--growth"):
        Growth.parse(text)
    assert Growth.parse("new=1") == Growth(1.0, 0.1, 0.004)


def test_what_is_left_out_is_said():
    config = recipe("experience.prefill_path=x", "experience.strategy=both")
    assert [line.split(":")[0].split(" =")[0] for line in not_simulated(config)] == [
        "experience.prefill_path",
        "experience.answer_choice",
        "data.validation",
    ]


def test_the_outcome_is_written_as_files_and_pictures(tmp_path):
    assumptions = Assumptions(NOTHING_LEARNED)
    run = simulate(recipe(), constant(0.5, 100), assumptions, keep_events=True)
    write_outcome(tmp_path / "out", run, summary(run), assumptions, "constant:0.5")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "experience_history.jsonl", "metrics.jsonl", "recipe.yaml",
        "simulation.csv", "simulation.json", "simulation.png",
    ]  # fmt: skip
    tried = [event for _, events in read_history(tmp_path / "out" / HISTORY_FILE) for event in events]
    assert sum(event.kind == "tried" for event in tried) == 4 * 8
    lines = (tmp_path / "out" / "simulation.csv").read_text().splitlines()
    assert len(lines) == 5
    assert lines[0].endswith("true_pass_rate")
    content = json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert content["summary"]["steps"] == 4
    assert len(draw_outcome(run, "x").axes) >= 6


def test_replay_steps_are_simulated_by_the_trainer_itself():
    """2 x B x K answers at most, one of each stored question, and a weight of 1 - 0.5 on average."""
    config = recipe("experience.strategy=replay_step", "grpo.max_num_steps=6")
    run = simulate(config, constant(0.5, 200), Assumptions(NOTHING_LEARNED))
    assert column(run, "experience/replayed_questions") == [0] * 6
    # A replay step follows the recording of its own step's answers.
    assert column(run, "replay_step/answers") == column(run, "experience/buffer_questions")
    assert run.records[-1]["replay_step/mean_weight"] == pytest.approx(0.5, abs=0.1)
    assert run.records[-1]["budget/stored_answers"] == sum(column(run, "replay_step/answers"))


@pytest.mark.parametrize("counts", [("x", 8), (9, 8), (0, 0), (-1, 8), (1.5, 8), (1, 10**30)])
def test_counts_that_are_none_are_refused_with_their_line(tmp_path, counts):
    path = tmp_path / "own.pass_rates.jsonl"
    path.write_text(json.dumps({"num_correct": counts[0], "num_answers": counts[1]}) + "\n")
    with pytest.raises(DataError, match=r"line 1.*0 <= num_correct <= num_answers"):
        find_rates(str(path), 1, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="above 0 and finite"):
        find_rates("beta:nan,1", 1, np.random.default_rng(0))
