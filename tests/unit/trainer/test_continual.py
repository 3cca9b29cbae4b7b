"""A run that begins with the weights, and perhaps the experience, of another run's checkpoint."""

import pytest
import torch
from scripted import make_config
from test_resume import untimed, weights

from exgrpo_megatron import run_inputs
from exgrpo_megatron.errors import CheckpointError, ConfigError

OPTIONS = {"checkpointing": {"export_hf": False}, "policy": {"megatron_cfg": {"optimizer": {"lr": 1e-3}}}}


@pytest.fixture
def earlier(tmp_path, run_steps):
    """A run of three steps, and its checkpoint."""
    (tmp_path / "earlier").mkdir()
    training, _ = run_steps(make_config(tmp_path / "earlier", **OPTIONS), 3)
    return training, training.last_checkpoint


def later_config(tmp_path, checkpoint, lr, **experience):
    (tmp_path / "later").mkdir()
    return make_config(
        tmp_path / "later",
        checkpointing={"export_hf": False},
        policy={"init_from": str(checkpoint), "megatron_cfg": {"optimizer": {"lr": lr, "min_lr": 0.0}}},
        experience={"start_pass_rate": None, **experience},
    )


def test_weights_are_taken_over_and_steps_and_optimiser_begin_anew(tmp_path, run_steps, earlier):
    training, checkpoint = earlier
    before = {name: tensor.clone() for name, tensor in weights(training).items()}
    config = later_config(tmp_path, checkpoint, 1e-12)
    later, notes = run_steps(config, 1)
    assert f"beginning with the weights of {checkpoint}, after its 3 steps" in notes
    # One step of Adam moves a weight by at most lr, here 1e-12.
    assert all(torch.allclose(tensor, before[name], rtol=0, atol=2e-12) for name, tensor in weights(later).items())
    (record,) = untimed(tmp_path / "later" / "run" / "metrics.jsonl")
    assert (record["policy/version"], record["experience/replayed_questions"]) == (1, 0)
    resumed, notes = run_steps(config, 1)
    assert resumed.trainer.last_step == 2
    assert not any("beginning with" in note for note in notes)


def test_a_new_optimiser_has_no_moments_of_the_old_run(tmp_path, run_steps, earlier):
    training, checkpoint = earlier
    before = {name: tensor.clone() for name, tensor in weights(training).items()}
    later, _ = run_steps(later_config(tmp_path, checkpoint, 1e-4), 1)
    moved = max(float((tensor - before[name]).abs().max()) for name, tensor in weights(later).items())
    # Adam's first step is lr x g / (|g| + eps), hence lr where g is far from 0, and weight decay a hundredth of it.
    assert moved == pytest.approx(1e-4, rel=0.1)


def test_experience_comes_along_if_it_is_named(tmp_path, run_steps, earlier):
    training, checkpoint = earlier
    config = later_config(tmp_path, checkpoint, 1e-4, prefill_path=str(checkpoint / "experience"))
    stored = training.parts.experience.num_questions
    assert stored > 0
    _, notes = run_steps(config, 1)
    assert any(f"answers of {stored} questions from {checkpoint / 'experience'}" in note for note in notes)
    (record,) = untimed(tmp_path / "later" / "run" / "metrics.jsonl")
    assert record["experience/replayed_questions"] == 2
    assert record["ratio_replayed/p50"] != 1


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, earlier):
    _, checkpoint = earlier
    for path, text in (
        (tmp_path / "nothing", "neither a run's checkpoint"),
        (tmp_path / "earlier" / "run" / "model", "is a Hugging Face folder: set policy.model_name to it"),
    ):
        config = make_config(tmp_path, policy={"init_from": str(path)})
        with pytest.raises(ConfigError, match=r"policy\.init_from") as caught:
            run_inputs.check_init_from(config)
        assert text in str(caught.value)
    run_inputs.check_init_from(make_config(tmp_path, policy={"init_from": str(checkpoint)}))


def test_a_damaged_checkpoint_is_refused(tmp_path, run_steps, earlier):
    _, checkpoint = earlier
    victim = max((checkpoint / "policy").iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is not as it was saved"):
        run_steps(later_config(tmp_path, checkpoint, 1e-4), 1)


def test_a_warm_start_beside_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.init_from = 'x', but sft\.warm_start = true"):
        make_config(
            tmp_path, policy={"init_from": "x"}, sft={"warm_start": True, "data": {"generator": "chain_arithmetic"}}
        )
