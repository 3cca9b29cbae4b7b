"""What the number of data-parallel ranks changes: nothing, but for two switches that reproduce the released code."""

import json
from pathlib import Path

import pytest
from launch import launch

from exgrpo_megatron.data.embedded_model import CHAIN_QWEN2, materialize

SCRIPT = Path(__file__).with_name("run_variants.py")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    model = materialize(CHAIN_QWEN2, tmp_path_factory.mktemp("embedded") / "model", seed=0)

    def record_of(ranks):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        launch(SCRIPT, ranks, [str(folder), str(model)], timeout_s=300)
        return json.loads((folder / "record.json").read_text())

    return record_of(1), record_of(2)


@pytest.mark.parametrize(
    ("normalizer", "loss", "factor"),
    [
        # 16 sequences of at most 96 tokens, ten more tokens pushed up than down at A = 1 (test_objective_keys.py).
        ("global_width", -10 / (96 * 16), 1.0),
        ("per_answer_length", 0.0, 1.0),
        # The mean over ranks of each rank's sum: half of it on two.
        ("rank_width", -10 / 96, 0.5),
    ],
)
def test_only_rank_width_depends_on_the_number_of_ranks(records, normalizer, loss, factor):
    one, two = (record[normalizer] for record in records)
    assert one["policy/loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert two["policy/loss"] == pytest.approx(loss * factor, rel=1e-4, abs=1e-7)
    assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"] * factor, rel=1e-4)


@pytest.mark.parametrize(
    ("bonus", "on_one", "on_two"),
    [
        ("global_mean 4", 1, 1),
        # Means of four micro-batches of four sequences, averaged over ranks: 4, and 2 + 2 over 2.
        ("per_micro_batch 4", 4, 2),
        # One micro-batch a rank, of 16 or 8.
        ("per_micro_batch 16", 1, 1),
    ],
)
def test_only_the_bonus_per_micro_batch_depends_on_ranks(records, bonus, on_one, on_two):
    one, two = (record[bonus] for record in records)
    assert one["policy/entropy"] == pytest.approx(two["policy/entropy"], rel=1e-5)
    assert one["policy/loss"] == pytest.approx(-0.01 * on_one * one["policy/entropy"], rel=1e-5)
    assert two["policy/loss"] == pytest.approx(-0.01 * on_two * two["policy/entropy"], rel=1e-5)


def test_a_rank_without_questions_takes_part(records):
    one, two = (record["few"] for record in records)
    assert [step["experience/replayed_questions"] for step in two] == [1, 1]
    for mine, theirs in zip(two, one, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/entropy", "rollout/tokens", "reward/pass_rate"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name


def test_a_replay_step_does_not_depend_on_the_number_of_ranks(records):
    one, two = (record["replay step"] for record in records)
    # q1, replayed in step 1, and three new questions; then more than floor(0.32 x 16) are stored.
    assert [step["replay_step/answers"] for step in two] == [4, 5]
    for mine, theirs in zip(two, one, strict=True):
        names = [name for name in mine if name.startswith(("replay_step/", "ratio_replay_step/", "budget/"))]
        assert len(names) > 15
        for name in [*names, "policy/loss", "policy/grad_norm", "experience/stored_answers"]:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-6), name
