"""Training steps of the actor on a GPU against plain torch on the CPU; needs megatron-core and the whole project."""

from __future__ import annotations

import pytest
import torch
from whole_project import skip_module_without_it

skip_module_without_it()


def test_two_steps_of_the_actor_equal_plain_autograd_with_adamw(device, tmp_path, data_parallel):
    """The same comparison as on the CPU, with float32 on both sides: only the order of additions differs."""
    from policy_models import hf_state, make_actor, plain_adamw, plain_loss, random_sequences, save_model

    from exgrpo_kernels.reference import Objective
    from exgrpo_megatron.config import OptimizerConfig

    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_eps=1e-4)
    model = save_model("qwen2", tmp_path)
    actor = make_actor(tmp_path, data_parallel, optimizer, train_micro_batch_size=4)
    assert actor.device.type == device.type
    plain = plain_adamw(model, optimizer)
    for seed in range(2):
        sequences = random_sequences(10, seed)
        result = actor.update(sequences, Objective(), temperature=0.8)
        plain.zero_grad()
        loss = plain_loss(model, sequences, temperature=0.8)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        plain.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    weights = hf_state(model)
    for name, weight in actor.export_weights():
        torch.testing.assert_close(weight.cpu(), weights[name], rtol=0, atol=1e-4)
