"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def data_parallel():
    """The process group of this test process, as an unlaunched run has it."""
    from exgrpo_megatron.config import ClusterConfig, PolicyConfig
    from exgrpo_megatron.policy.distributed import initialize

    comm = initialize(PolicyConfig(model_name="embedded:chain-qwen2"), ClusterConfig(), seed=0)
    yield comm
    comm.shutdown()


@pytest.fixture(scope="session")
def half_trained_model(tmp_path_factory, data_parallel):
    """A Hugging Face folder: the quickstart's model after 150 supervised steps, which solves some short chains."""
    from exgrpo_megatron import build, session
    from exgrpo_megatron.parts import SilentReporter
    from exgrpo_megatron.recipe import load_recipe

    folder = tmp_path_factory.mktemp("half_trained")
    config = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        ["sft.max_num_steps=150", "sft.generator_worked_share=0.8", f"logger.log_dir={folder / 'run'}"],
    )
    inputs = build.load_inputs(config, data_parallel)
    reporter, stop = SilentReporter(), session.StopSignal()
    made = session.supervised_run(config, inputs, folder / "model", data_parallel, reporter, stop)
    assert made is not None
    return made
