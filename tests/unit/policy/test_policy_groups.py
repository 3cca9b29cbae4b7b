"""The CPU backend touches nothing but Megatron; the process group is what the recipe asks for."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_models import make_actor, random_sequences, save_model

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.config import ClusterConfig, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.policy import backend, distributed
from exgrpo_megatron.policy.distributed import DataParallel, initialize

POLICY = PolicyConfig(model_name="unused")
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the backend does nothing where CUDA is available")


@needs_no_cuda
def test_only_megatron_sees_the_stand_in() -> None:
    zeros, manual_seed = torch.zeros, torch.cuda.manual_seed
    backend.install()
    from megatron.core import utils

    assert utils.torch.zeros(2, device="cuda").device.type == "cpu"
    assert utils.torch.cuda.current_device() == torch.device("cpu")
    assert torch.zeros is zeros
    assert torch.cuda.manual_seed is manual_seed


@needs_no_cuda
def test_installing_twice_changes_nothing() -> None:
    backend.install()
    finders = list(sys.meta_path)
    backend.install()
    assert sys.meta_path == finders


@needs_no_cuda
def test_a_module_imported_later_is_adapted_too() -> None:
    backend.install()
    sys.modules.pop("megatron.core.full_cuda_graph", None)
    from megatron.core import full_cuda_graph

    assert full_cuda_graph.torch is not torch


def test_the_group_of_one_exchanges_with_itself(group: DataParallel) -> None:
    assert (group.rank, group.size) == (0, 1)
    assert group.all_gather({"a": 1}) == [{"a": 1}]
    assert group.broadcast("x") == "x"
    group.barrier()


@needs_no_cuda
def test_tensors_spell_their_type_as_ever_after_a_bfloat16_update(tmp_path: Path, group: DataParallel) -> None:
    save_model("qwen2", tmp_path)
    make_actor(tmp_path, group, precision="bfloat16").update(random_sequences(3), Objective(), temperature=1.0)
    assert torch.ones(1).type() == "torch.FloatTensor"


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_every_generator_that_a_checkpoint_holds_is_seeded(seed: int, group: DataParallel) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    distributed._seed(seed)
    first = draws()
    assert draws() != first
    distributed._seed(seed)
    assert draws() == first
    distributed._seed(seed ^ 1)
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_a_second_group_beside_the_first_is_refused(group: DataParallel) -> None:
    with pytest.raises(RuntimeError, match="a process group exists already"):
        initialize(POLICY, ClusterConfig(), seed=0)
    assert group.all_gather(1) == [1]


def test_another_number_of_processes_than_the_recipe_says_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.num_nodes \* cluster.gpus_per_node = 2 \* 4 = 8 .* processes, 1:"):
        initialize(POLICY, ClusterConfig(num_nodes=2, gpus_per_node=4), seed=0)
