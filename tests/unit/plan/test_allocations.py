"""Planned bytes against those of a real model in this process."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policy"))

from allocations import allocated, chunks, parameters, planned
from policy_models import make_actor, save_model

from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.plan.activations import TokenLayout, boundary_bytes, head_bytes, layer_bytes
from exgrpo_megatron.plan.ranks import Ranks

ALONE = Ranks(1, 1, 1, 1)
ROWS, POSITIONS, PROMPT = 4, 60, 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "llama", "qwen3"):
        save_model(family, folder / family, hidden_size=64, intermediate_size=160)
    return folder


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [False, True], ids=["plain", "distributed optimizer"])
def test_weights_gradients_and_optimizer_are_planned_to_the_byte(folders, data_parallel, family, precision, shared):
    layout = MegatronConfig(optimizer={"use_distributed_optimizer": shared})
    actor = make_actor(folders / family, data_parallel, precision=precision, megatron_cfg=layout)
    assert planned(actor, layout, ALONE, 0) == allocated(actor)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_activations_are_planned_to_a_tenth(folders, data_parallel, family, precision, recomputed):
    """Against the memory behind the tensors that autograd saves. The heads of this model are a quarter of its width, so
    that sines and cosines, counted for every row here and kept once by the model, weigh more than in a real one."""
    actor = make_actor(
        folders / family, data_parallel, precision=precision, megatron_cfg={"activation_checkpointing": recomputed}
    )
    saved = {parameter.untyped_storage().data_ptr(): 0 for parameter in parameters(actor)}
    kept = []

    def pack(tensor):
        kept.append(tensor)  # alive, so that no other tensor gets its memory
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    tokens = torch.randint(0, 37, (ROWS, POSITIONS))
    mask = torch.arange(POSITIONS).expand(ROWS, -1) >= PROMPT
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunks(actor._model)[0](tokens, None, None, loss_mask=mask)
    number_bytes = 2 if precision == "bfloat16" else 4
    layout = TokenLayout(ROWS * POSITIONS, ROWS * (POSITIONS - PROMPT), 1, False, number_bytes)
    arch = actor.architecture
    each = boundary_bytes(arch, layout) if recomputed else layer_bytes(arch, layout)
    expected = arch.num_layers * each + head_bytes(arch, layout)
    assert sum(saved.values()) == pytest.approx(expected, rel=0.1)
