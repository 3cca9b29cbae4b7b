"""Saving, and going on as if nothing had happened."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from policy_models import make_actor, max_difference, random_sequences, save_model

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import OptimizerConfig, SchedulerConfig
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel

SCHEDULER = SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=1)


def steps(actor: MegatronActor, seeds: range) -> list[tuple[float, float, float]]:
    results = [actor.update(random_sequences(5, seed), Objective(), temperature=1.0) for seed in seeds]
    return [(result.loss, result.grad_norm, result.learning_rate) for result in results]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved_after", [0, 3])
def test_a_resumed_run_continues_bit_for_bit(
    precision: str, saved_after: int, tmp_path: Path, group: DataParallel
) -> None:
    save_model("qwen2", tmp_path / "model")
    first = make_actor(tmp_path / "model", group, scheduler=SCHEDULER, precision=precision)
    steps(first, range(saved_after))
    first.save(tmp_path / "saved")
    expected = steps(first, range(3, 6))
    second = make_actor(tmp_path / "model", group, scheduler=SCHEDULER, precision=precision)
    steps(second, range(10, 11))  # a state of its own, which must not survive
    second.load(tmp_path / "saved")
    assert second.version == saved_after
    assert steps(second, range(3, 6)) == expected
    assert max_difference(dict(second.export_weights()), dict(first.export_weights())) == 0


def test_every_random_generator_is_restored(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)

    def draws() -> tuple[float, float, float, float]:
        with get_cuda_rng_tracker().fork():
            megatron = float(torch.rand(()))
        return random.random(), float(np.random.rand()), float(torch.rand(())), megatron

    actor.save(tmp_path / "saved")
    expected = draws()
    assert draws() != expected
    actor.load(tmp_path / "saved")
    assert draws() == expected


def test_options_of_the_optimizer_stay_those_of_the_recipe(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    first = make_actor(tmp_path / "model", group, OptimizerConfig(lr=1e-3))
    steps(first, range(2))
    first.save(tmp_path / "saved")
    second = make_actor(tmp_path / "model", group, OptimizerConfig(lr=5e-4))
    second.load(tmp_path / "saved")
    assert [rate for _, _, rate in steps(second, range(2, 3))] == [5e-4]


def test_a_checkpoint_of_another_architecture_is_refused_with_both(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "qwen2")
    save_model("llama", tmp_path / "llama")
    make_actor(tmp_path / "qwen2", group).save(tmp_path / "saved")
    other = make_actor(tmp_path / "llama", group)
    before = dict(other.export_weights())
    with pytest.raises(CheckpointError, match=r"family: checkpoint 'qwen2', model 'llama'; tied: checkpoint True"):
        other.load(tmp_path / "saved")
    assert max_difference(dict(other.export_weights()), before) == 0


def test_a_folder_in_use_is_not_written_over(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    with pytest.raises(CheckpointError, match="is not empty"):
        make_actor(tmp_path / "model", group).save(tmp_path / "model")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make the checkpoint folder .*file/saved"):
        make_actor(tmp_path / "model", group).save(tmp_path / "file" / "saved")


def test_a_full_disk_is_reported(tmp_path: Path, group: DataParallel) -> None:
    """A limit on the size of a file stands for a disk that fills up while the weights are written."""
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*/saved: .*; check free space"):
            actor.save(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(CheckpointError, match="a save was interrupted"):
        actor.load(tmp_path / "saved")


@pytest.mark.parametrize("damage", ["empty", "no metadata", "cut short", "absent", "{}", "[]", "null"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: str, tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path / "model")
    actor = make_actor(tmp_path / "model", group)
    steps(actor, range(1))
    saved = tmp_path / "saved"
    actor.save(saved)
    if damage == "empty":
        for path in saved.iterdir():
            path.unlink()
    elif damage == "no metadata":
        (saved / ".metadata").unlink()
    elif damage == "cut short":
        (data,) = saved.glob("*.distcp")
        data.write_bytes(data.read_bytes()[:-20_000])
    elif damage in ("{}", "[]", "null"):
        (saved / "metadata.json").write_text(damage)
    folder = tmp_path / "elsewhere" if damage == "absent" else saved
    before = dict(actor.export_weights())
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint|is no checkpoint"):
        actor.load(folder)
    assert max_difference(dict(actor.export_weights()), before) == 0
