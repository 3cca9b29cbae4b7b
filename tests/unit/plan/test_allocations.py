"""Planned bytes against those of a real model in this process."""

import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "policy"))

from allocations import allocated, parameters, planned
from policy_models import make_actor, save_model

from exgrpo_kernels import fused
from exgrpo_megatron.config import MegatronConfig
from exgrpo_megatron.plan.activations import TokenLayout, boundary_bytes, head_bytes, layer_bytes, loss_bytes
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
    """Against the memory behind the tensors that autograd saves and the hidden states that come out. The heads of this
    model are a quarter of its width, so that sines and cosines, counted for every row here and kept once by the model,
    weigh more than in a real one."""
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
        pack(actor._gpt[0](tokens, None, None, loss_mask=mask))
    number_bytes = 2 if precision == "bfloat16" else 4
    layout = TokenLayout(ROWS * POSITIONS, ROWS * (POSITIONS - PROMPT), 1, False, number_bytes)
    arch = actor.architecture
    each = boundary_bytes(arch, layout) if recomputed else layer_bytes(arch, layout)
    expected = arch.num_layers * each + head_bytes(arch, layout)
    assert sum(saved.values()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("kernel", "chunk_size"), [("linear", 100), ("logits", None), ("reference", None)])
def test_the_memory_of_a_loss_is_planned(folders, data_parallel, kernel, chunk_size):
    """The peak of what torch's allocator is asked for. Beside what is planned plain torch works on blocks of rows, up
    to two of 4 MiB at a time, and autograd of the reference on a mask of the logits, 16 MB; Triton needs none."""
    arch = replace(make_actor(folders / "qwen2", data_parallel).architecture, vocab_size=8000)
    tokens, width = 2000, arch.hidden_size
    plan = loss_bytes(arch, TokenLayout(tokens, tokens, 1, False, 4, kernel, chunk_size), backward=True)
    hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(8064, width).requires_grad_()
    head, zeros = fused.OutputHead(weight, 8000), torch.zeros(tokens)
    inputs = fused.LossInputs(zeros.long(), zeros, zeros + 1, zeros.bool(), zeros + 1, zeros + 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fused.token_loss(hidden, head, inputs, fused.Objective(), form=kernel, chunk_size=chunk_size).loss.backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert plan < peak < plan + (26 << 20 if kernel == "reference" else 10 << 20)
