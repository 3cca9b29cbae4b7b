"""The trainer with vLLM rollouts: the agreement gate, what it catches, and an engine that fails in the middle."""

from __future__ import annotations

import pytest
from vllm_models import TOLERANCE, needs_vllm

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.agreement import AgreementGate
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.trainer import Trainer

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, half_trained_model, data_parallel):
    """After one step on prompts that fill a block of the prefix cache (128 tokens)."""
    config = parse_recipe(
        {
            "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "seed": 5},
            "loss_fn": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
            "data": {
                "train": {"generator": "chain_arithmetic", "generator_size": 32},
                "prompt_template": "1+1" * 45 + "{question}",
                "max_input_seq_length": 160,
            },
            "policy": {
                "model_name": str(half_trained_model),
                "train_global_batch_size": 16,
                "max_total_sequence_length": 192,
                "generation": {
                    "backend": "vllm",
                    "max_new_tokens": 32,
                    "vllm_cfg": {"update_weights_bucket_megabytes": 1, "agreement": {"max_abs_difference": TOLERANCE}},
                },
                "megatron_cfg": {"optimizer": {"lr": 1e-3}},
            },
            "env": {"math": {"num_workers": 1}},
            "logger": {"log_dir": str(tmp_path_factory.mktemp("run"))},
        }
    )
    inputs = run_inputs.load_inputs(config, data_parallel)
    actor = build.build_rl_actor(config, inputs.model_dir, data_parallel)
    trainer = Trainer(build.build_parts(config, inputs, actor, data_parallel))
    trainer.push_weights()
    yield trainer
    trainer.parts.engine.close()
    trainer.parts.verifier.close()


@pytest.fixture
def compare(trainer):
    """Compares engine and actor on questions of the last step, as a run does."""
    gate = AgreementGate(trainer.parts)

    def after(result):
        return gate.compare(result.step, [group.question for group in result.groups])

    return after


def vllm_of(trainer):
    return trainer.parts.engine._engine._llm


def test_a_step_leaves_engine_and_actor_in_agreement_and_rollouts_carry_the_version(trainer, compare):
    first, second = trainer.step(), trainer.step()
    assert [m.policy_version for group in first.groups for m in group.trajectories if not m.replayed] == [0] * 16
    fresh = [m.policy_version for group in second.groups for m in group.trajectories if not m.replayed]
    assert set(fresh) == {1}
    assert vllm_of(trainer).get_weight_version() == "2"
    agreement = compare(second)
    assert agreement.fault is None
    assert agreement.metrics["agreement/max_abs_difference"] < TOLERANCE
    assert agreement.metrics["agreement/tokens"] > 20
    # Fresh tokens are trained on weights that sampled them, and with float32 on both sides.
    for name in ("ratio_fresh/max", "ratio_engine/min", "ratio_engine/max", "correction/mean", "correction/max"):
        assert second.metrics[name] == pytest.approx(1, abs=1e-4), name
    assert second.metrics["correction/limited_share"] == 0


def test_a_prefix_cache_of_older_weights_is_caught(trainer, compare, monkeypatch):
    monkeypatch.setattr(vllm_of(trainer), "reset_prefix_cache", lambda: True)
    agreement = compare(trainer.step())
    assert agreement.metrics["agreement/beyond_limits"] == 1
    assert "policy.generation.vllm_cfg.agreement" in agreement.fault
    monkeypatch.undo()
    trainer.push_weights()


def test_an_output_layer_left_behind_is_caught(trainer, compare, monkeypatch):
    from exgrpo_megatron.rollout.vllm_engine import VLLMEngine

    whole = VLLMEngine._bucket_info

    def forgetful(engine, buffer, piece):
        info = whole(engine, buffer, piece)
        return {**info, "tensors": [tensor for tensor in info["tensors"] if tensor[0] != "lm_head.weight"]}

    monkeypatch.setattr(VLLMEngine, "_bucket_info", forgetful)
    assert compare(trainer.step()).fault is not None
    monkeypatch.undo()
    trainer.push_weights()


def test_weights_that_the_engine_did_not_get_are_an_error_of_the_engine(trainer, monkeypatch):
    from exgrpo_megatron.rollout.protocol import EngineFailure
    from exgrpo_megatron.rollout.vllm_engine import VLLMEngine

    whole = VLLMEngine._bucket_info

    def forgetful(engine, buffer, piece):
        info = whole(engine, buffer, piece)
        return {**info, "tensors": [tensor for tensor in info["tensors"] if "layers.1.mlp" not in tensor[0]]}

    monkeypatch.setattr(VLLMEngine, "_bucket_info", forgetful)
    engine = trainer.parts.engine._engine
    with pytest.raises(EngineFailure, match=r"no new values came for .*layers\.1\.mlp"):
        engine.load_weights(trainer.parts.policy.export_weights(), 7)
    monkeypatch.undo()
    engine.close()
    trainer.push_weights()


def test_an_engine_left_half_updated_is_replaced_and_has_the_current_weights(trainer, compare, monkeypatch):
    def breaks(_):
        raise RuntimeError("the connection is gone")

    engine = trainer.parts.engine
    monkeypatch.setattr(vllm_of(trainer), "update_weights", breaks)
    result = trainer.step()
    assert engine.num_restarts == 1
    assert engine.policy_version == trainer.parts.policy.version
    assert compare(result).fault is None
    assert trainer.step().metrics["rollout/engine_restarts"] == 1
