"""What a rank says of itself in long phases, so that the others wait for it (hang.py)."""

from contextlib import closing

import pytest
from scripted import make_config

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.policy.export import export_hf

build_verifier = build.build_verifier  # of which tests here have one that is shared


@pytest.fixture
def moves(data_parallel):
    """Signs of life of what it is given, without the places it passes."""

    def moves(work):
        before = data_parallel.places.now()
        work()
        after = data_parallel.places.now()
        return (after.moves - before.moves) - (after.count - before.count)

    return moves


def test_every_question_read_weight_handed_out_and_tensor_compared_counts(tmp_path, data_parallel, moves):
    config, found = make_config(tmp_path), []
    assert moves(lambda: found.append(run_inputs.load_inputs(config, data_parallel))) >= len(found[0].train.questions)
    actor = build.build_rl_actor(config, found[0].model_dir, data_parallel)
    weights = len(actor.weight_manifest())
    assert moves(lambda: list(actor.export_weights())) == weights
    # Written; each parameter, some of several tensors, loaded back; and four sequences that are scored.
    parameters = sum(1 for chunk in actor._gpt for _ in chunk.named_parameters())
    exported = moves(lambda: export_hf(actor, tmp_path / "hf", found[0].model_dir))
    assert exported >= weights + parameters


def test_every_answer_graded_counts(tmp_path, data_parallel, moves):
    reward = "exgrpo_megatron.data.chain_arithmetic:partial_credit"
    config = make_config(tmp_path, env={"reward_function": reward, "math": {"num_workers": 1}})
    with closing(build_verifier(config, data_parallel)) as verifier:
        items = [(f"\\boxed{{{n}}}", "3", "1 + 2") for n in range(5)]
        assert moves(lambda: verifier.grade(items)) == 5
