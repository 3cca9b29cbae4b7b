"""The actor on Transformer Engine's layers, against Megatron's own: needs a GPU and a whole transformer-engine.

    pytest -v tests/gpu/test_transformer_engine_layers.py

The yardstick is Megatron's own layers in float32. Any bfloat16 forward pass is some distance from it, and the distance
of Megatron's own in bfloat16 is measured in the same test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_project import skip_module_without_it

skip_module_without_it()

import numpy as np  # noqa: E402

from exgrpo_kernels.reference import Objective  # noqa: E402
from exgrpo_megatron.accelerators import installed  # noqa: E402
from exgrpo_megatron.config import ClusterConfig, OptimizerConfig, PolicyConfig, SchedulerConfig  # noqa: E402
from exgrpo_megatron.types import TrainSequence  # noqa: E402


def obstacle() -> str | None:
    """Why none of this can run here; None: it can."""
    found = installed()
    if found.gpu is None:
        return "there is no CUDA device"
    return None if found.transformer_engine.works else found.transformer_engine.describe()


pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

VOCABULARY = 512
ENGINE: dict[str, Any] = {"transformer_impl": "transformer_engine"}
LOCAL: dict[str, Any] = {"transformer_impl": "local"}
PACKED: dict[str, Any] = {"sequence_packing": {"enabled": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"))


def save_model(path: Path) -> Path:
    """Norms of queries and keys, grouped heads, an output layer of its own; every side a multiple of 128."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_actor(folder: Path, group: Any, layout: dict[str, Any], precision: str = "bfloat16", **policy: Any) -> Any:
    from exgrpo_megatron.policy.actor import MegatronActor

    recipe = PolicyConfig(model_name=str(folder), precision=precision, megatron_cfg=layout, **policy)
    optimizer = OptimizerConfig(lr=1e-2)
    return MegatronActor(folder, recipe, optimizer, SchedulerConfig(), total_updates=10, comm=group)


def sequences(count: int = 12) -> list[TrainSequence]:
    """Of 20 to 300 tokens."""
    generator = np.random.default_rng(0)
    made = []
    for index in range(count):
        prompt = generator.integers(0, VOCABULARY, generator.integers(10, 60), dtype=np.int32)
        response = generator.integers(0, VOCABULARY, generator.integers(10, 240), dtype=np.int32)
        old = np.full(len(response), -np.log(VOCABULARY), np.float32)
        made.append(TrainSequence(prompt, response, old, float((-1) ** index), index % 3 == 0, 1e-3, 1e-5))
    return made


def logprobs(actor: Any) -> np.ndarray:
    pairs = [(row.prompt_ids, row.response_ids) for row in sequences()]
    return np.concatenate([scored.logprobs for scored in actor.score(pairs, 1.0)])


def step(actor: Any) -> Any:
    return actor.update(sequences(), Objective(), temperature=1.0)


def rms(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.mean((left - right) ** 2)))


def in_bfloat16(actor: Any) -> np.ndarray:
    with actor.without_fp8():
        return logprobs(actor)


def report(text: str) -> None:
    """For `pytest -s`, and beside a failure."""
    sys.stdout.write(f"\n{text}\n")


@pytest.fixture(scope="module")
def exact(folder: Path, data_parallel: Any) -> np.ndarray:
    return logprobs(make_actor(folder, data_parallel, LOCAL, "float32"))


@pytest.fixture(scope="module")
def rounding(folder: Path, data_parallel: Any, exact: np.ndarray) -> float:
    """How far Megatron's own layers in bfloat16 are from themselves in float32, in nats."""
    return rms(logprobs(make_actor(folder, data_parallel, LOCAL)), exact)


def test_the_layers_attention_and_adam_are_transformer_engines(folder: Path, data_parallel: Any) -> None:
    from megatron.core.extensions import transformer_engine as engine

    actor = make_actor(folder, data_parallel, ENGINE)
    layer = actor._gpt[0].decoder.layers[0]
    assert isinstance(layer.self_attention.linear_qkv, engine.TELayerNormColumnParallelLinear)
    assert isinstance(layer.self_attention.core_attention, engine.TEDotProductAttention)
    (single,) = actor._optimizer.chained_optimizers
    assert type(single.optimizer).__module__.startswith("transformer_engine.")
    assert layer.config.apply_rope_fusion


@pytest.mark.parametrize("batching", [{}, PACKED], ids=["padded", "packed"])
def test_its_log_probs_are_as_close_to_float32_as_bfloat16_is(
    folder: Path, data_parallel: Any, exact: np.ndarray, rounding: float, batching: dict[str, Any]
) -> None:
    distance = rms(logprobs(make_actor(folder, data_parallel, ENGINE, **batching)), exact)
    report(f"Transformer Engine {distance:.2e} nats from float32, Megatron's own {rounding:.2e}")
    assert distance <= 2 * rounding


@pytest.mark.parametrize("batching", [{}, PACKED], ids=["padded", "packed"])
def test_its_gradient_is_that_of_megatrons_own_layers(
    folder: Path, data_parallel: Any, batching: dict[str, Any]
) -> None:
    """Norms of one gradient in bfloat16 agree to its rounding, 2^-8, of which sums average most out."""
    norms = [
        step(make_actor(folder, data_parallel, layout, **batching)).grad_norm
        for layout in (
            {**ENGINE, "gradient_accumulation_fusion": True},
            {**ENGINE, "gradient_accumulation_fusion": False},
            {**LOCAL, "gradient_accumulation_fusion": False},
        )
    ]
    report(f"gradient norms: {norms}")
    assert norms == pytest.approx([norms[2]] * 3, rel=2**-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("batching", [{}, PACKED], ids=["padded", "packed"])
def test_an_fp8_step_is_finite_and_leaves_bfloat16_weights(
    folder: Path, data_parallel: Any, recipe: str, batching: dict[str, Any]
) -> None:
    fault = installed().fp8_faults.get(recipe)
    if fault is not None:
        pytest.skip(fault)
    plain = make_actor(folder, data_parallel, ENGINE, **batching)
    layout = {**ENGINE, "fp8_cfg": {"enabled": True, "fp8_recipe": recipe}}
    actor = make_actor(folder, data_parallel, layout, **batching)
    assert all(weight.dtype == torch.bfloat16 for _, weight in actor.export_weights())
    distance = rms(logprobs(actor), logprobs(plain))
    report(f"{recipe}: log-probs {distance:.2e} nats from bfloat16")
    assert 0 < distance < 0.25  # e4m3 rounds by up to 2^-4, of which a sum over 256 numbers averages most out
    before = in_bfloat16(actor)
    assert rms(before, logprobs(plain)) < 1e-2
    result = step(actor)
    assert np.isfinite([result.loss, result.grad_norm]).all()
    assert not result.skipped
    # The weights' FP8 copies are made anew after a step: with old ones these would be the log-probs of before.
    after = in_bfloat16(actor)
    assert rms(logprobs(actor), after) < rms(after, before) / 2


@pytest.mark.parametrize(("writer", "reader"), [(ENGINE, ENGINE), (LOCAL, ENGINE), (ENGINE, LOCAL)])
def test_a_checkpoint_goes_on_on_either_layers(
    folder: Path, data_parallel: Any, tmp_path: Path, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    saved, loaded = make_actor(folder, data_parallel, writer), make_actor(folder, data_parallel, reader)
    step(saved)
    saved.save(tmp_path / "checkpoint")
    loaded.load(tmp_path / "checkpoint")
    mine, its = dict(saved.export_weights()), dict(loaded.export_weights())
    assert mine.keys() == its.keys()
    assert all(torch.equal(weight, its[name]) for name, weight in mine.items())
    assert step(loaded).grad_norm == pytest.approx(step(saved).grad_norm, rel=2**-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_context_parallel_ranks_get_the_log_probs_of_one(
    folder: Path, data_parallel: Any, tmp_path: Path, exact: np.ndarray, rounding: float, kind: str
) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([*launch, str(folder), kind, str(tmp_path / "logprobs.npy")], check=True, timeout=600)
    assert rms(np.load(tmp_path / "logprobs.npy"), exact) <= 2 * rounding


def main(folder: str, kind: str, target: str) -> None:
    """On two ranks: the log-probs under context parallelism, written by rank 0."""
    from exgrpo_megatron.policy.distributed import initialize

    batching = PACKED if kind == "packed" else {}
    layout = {**ENGINE, "context_parallel_size": 2}
    recipe = PolicyConfig(model_name=folder, precision="bfloat16", megatron_cfg=layout, **batching)
    comm = initialize(recipe, ClusterConfig(), seed=0)
    scored = logprobs(make_actor(Path(folder), comm, layout, **batching))
    if comm.is_main:
        np.save(target, scored)
    comm.barrier()
    comm.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
