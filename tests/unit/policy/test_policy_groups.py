"""The CPU backend touches nothing but Megatron, and groups can be made, checked and left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from exgrpo_kernels.reference import Objective
from policy_models import make_actor, random_sequences, save_model

from exgrpo_megatron.config import ClusterConfig, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.policy import backend
from exgrpo_megatron.policy.distributed import initialize

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


def test_groups_can_be_made_again_after_shutdown(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    results = []
    for _ in range(2):
        group = initialize(POLICY, ClusterConfig(), seed=3)
        assert (group.rank, group.size) == (0, 1)
        assert group.all_gather({"a": 1}) == [{"a": 1}]
        assert group.broadcast("x") == "x"
        group.barrier()
        actor = make_actor(tmp_path, group, precision="bfloat16")
        results.append(actor.update(random_sequences(3), Objective(), temperature=1.0))
        assert torch.ones(1).type() == "torch.FloatTensor"
        group.shutdown()
    assert results[0].grad_norm == results[1].grad_norm


def test_another_number_of_processes_than_the_recipe_says_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.num_nodes \* cluster.gpus_per_node = 2 \* 4 = 8 .* processes, 1:"):
        initialize(POLICY, ClusterConfig(num_nodes=2, gpus_per_node=4), seed=0)
