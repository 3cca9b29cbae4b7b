"""Layers that keep their weights where Transformer Engine's do: norms in the linear layer behind them, and extra state.

They compute on a CPU what Megatron's own do, so everything that goes by a parameter's name can be held to them:
loading, export, optimizer state and checkpoints of either kind of layers read by the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from policy_models import make_actor, random_sequences, save_model

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.policy import layers, model
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.distributed import DataParallel


class NormLinear(ColumnParallelLinear):
    """RMSNorm, then the linear layer; the names are those of Transformer Engine's LayerNormLinear."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        epsilon = self.config.layernorm_epsilon
        return super().forward(F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, epsilon), *args, **kwargs)


class NormWithState(layers.RMSNorm):
    """Has an extra state, which Megatron's own norm has not."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None


def fused(local: Callable[..., Any]) -> Callable[..., Any]:
    def spec(config: Any, chunk: int | None) -> Any:
        block = local(config, chunk)
        layer = block.layer_specs[0].submodules
        attention = layer.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        attention.linear_qkv = NormLinear
        mlp = layer.mlp  # newer releases give a partial
        (mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules).linear_fc1 = NormLinear
        layer.sharded_state_dict_keys_map = {}
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = NormWithState
        return dataclasses.replace(block, layer_norm=NormWithState)

    return spec


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    return path


def make_both(
    folder: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> tuple[MegatronActor, MegatronActor]:
    local = make_actor(folder, group)
    monkeypatch.setattr(model, "decoder_spec", fused(layers.decoder_spec))
    return local, make_actor(folder, group)


def weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return dict(actor.export_weights())


def step(actor: MegatronActor, seed: int) -> float:
    return actor.update(random_sequences(5, seed), Objective(), temperature=1.0).loss


def assert_same_weights(left: MegatronActor, right: MegatronActor) -> None:
    mine, its = weights(left), weights(right)
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, its[name], rtol=0, atol=1e-6)


def test_fused_names_load_score_train_and_export_alike(
    folder: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, other = make_both(folder, group, monkeypatch)
    names = dict(other._gpt[0].named_parameters())
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert not [name for name in names if "input_layernorm" in name]
    assert_same_weights(local, other)
    sequences = [(row.prompt_ids, row.response_ids) for row in random_sequences(4)]
    for mine, its in zip(local.score(sequences, 1.0), other.score(sequences, 1.0), strict=True):
        np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=2e-6)
    assert step(local, 1) == pytest.approx(step(other, 1), abs=1e-6)
    assert_same_weights(local, other)


@pytest.mark.parametrize("writer", ["local", "fused"])
def test_a_checkpoint_of_either_layers_goes_on_in_the_other(
    folder: Path, group: DataParallel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writer: str
) -> None:
    local, other = make_both(folder, group, monkeypatch)
    saved, loaded = (local, other) if writer == "local" else (other, local)
    step(saved, 1)
    saved.save(tmp_path / "checkpoint")
    loaded.load(tmp_path / "checkpoint")
    assert_same_weights(saved, loaded)
    assert step(saved, 2) == pytest.approx(step(loaded, 2), abs=1e-6)
    assert_same_weights(saved, loaded)


def test_in_bfloat16_the_format_comes_back_after_the_pass(folder: Path, group: DataParallel) -> None:
    actor = make_actor(folder, group)
    config = actor._gpt[0].config
    config.fp8 = "e4m3"
    with actor.without_fp8():
        assert config.fp8 is None
        assert actor._gpt[0].decoder.layers[0].config.fp8 is None
    assert config.fp8 == "e4m3"
