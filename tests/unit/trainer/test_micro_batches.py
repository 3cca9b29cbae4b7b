"""How sequences are put into micro-batches changes neither answers nor weights; what padding it costs is counted."""

import pytest
from scripted import build_trainer, half_right

from exgrpo_megatron.recipe import dump_recipe, load_recipe

BUDGET = {"enabled": True, "train_mb_tokens": 128, "logprob_mb_tokens": 256}
BATCHINGS = {
    "number": {"train_micro_batch_size": 5},
    "dynamic": {"dynamic_batching": BUDGET},
    "packed": {"sequence_packing": BUDGET | {"algorithm": "best_fit_decreasing"}},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data_parallel):
    """Trainer, results of two steps, and lengths of the trained sequences of the first, by batching."""

    def steps(policy):
        trainer = build_trainer(tmp_path_factory.mktemp("run"), half_right, comm=data_parallel, policy=policy)
        return trainer, [trainer.step() for _ in range(2)]

    return {name: steps(policy) for name, policy in BATCHINGS.items()}


def answers(result):
    return [(group.question.id, [m.token_ids.tolist() for m in group.trajectories]) for group in result.groups]


@pytest.mark.parametrize("name", ["dynamic", "packed"])
def test_steps_are_those_of_micro_batches_by_number(trained, name):
    """The second step replays, after a choice by the model's entropies."""
    trainer, results = trained[name]
    other, expected = trained["number"]
    for mine, theirs in zip(results, expected, strict=True):
        assert answers(mine) == answers(theirs)
        for metric in ("policy/loss", "policy/grad_norm", "policy/entropy", "ratio_replayed/max"):
            if metric in theirs.metrics:
                assert mine.metrics[metric] == pytest.approx(theirs.metrics[metric], abs=1e-6, rel=1e-5), metric
    weights = dict(other.parts.policy.export_weights())
    for weight_name, weight in trainer.parts.policy.export_weights():
        assert (weight - weights[weight_name]).abs().max() < 1e-5, weight_name
    assert results[1].metrics["experience/replayed_questions"] > 0


def test_padding_is_what_rows_have_beyond_their_sequences(trained):
    """By number: 16 sequences from the longest down in rows of 5, 5, 5 and 1; packed: none."""
    for name in ("number", "packed"):
        result = trained[name][1][0]
        lengths = sorted(
            (
                len(group.question.prompt_ids) + len(member.token_ids) - 1
                for group in result.groups
                for member in group.trajectories
            ),
            reverse=True,
        )
        assert len(lengths) == 16
        positions = sum(5 * lengths[start] for start in (0, 5, 10)) + lengths[15]
        expected = 1 - sum(lengths) / positions if name == "number" else 0
        assert result.metrics["policy/padding_share"] == pytest.approx(expected)
    assert trained["number"][1][0].metrics["policy/padding_share"] > 0.02


@pytest.mark.parametrize("name", BATCHINGS)
def test_the_resolved_recipe_loads_again(trained, name, tmp_path):
    config = trained[name][0].config
    (tmp_path / "recipe.yaml").write_text(dump_recipe(config))
    assert load_recipe(tmp_path / "recipe.yaml") == config
