"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def stored_rows():
    """Reads a checkpoint's experience: (question, index of the answer) -> where it stands, what it is, and its
    log-probs as bytes."""
    import json

    from exgrpo_megatron.comm import SingleProcess
    from exgrpo_megatron.config import ExperienceConfig
    from exgrpo_megatron.experience.buffer import ExperienceBuffer

    def read(folder):
        group_size = json.loads((folder / "experience.json").read_text())["group_size"]
        buffer = ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), group_size, SingleProcess())
        buffer.load(folder)
        return {
            (name, index): (
                (bucket, place, answer.token_ids.tolist(), answer.policy_version, answer.step),
                answer.logprobs.tobytes(),
            )
            for place, (name, bucket) in enumerate(buffer.questions())
            for index, answer in enumerate(buffer.answers(name))
        }

    return read


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
    from exgrpo_megatron import build, supervised
    from exgrpo_megatron.parts import SilentReporter
    from exgrpo_megatron.recipe import load_recipe
    from exgrpo_megatron.stop import StopSignal

    folder = tmp_path_factory.mktemp("half_trained")
    config = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        ["sft.max_num_steps=150", "sft.generator_worked_share=0.8", f"logger.log_dir={folder / 'run'}"],
    )
    inputs = build.load_inputs(config, data_parallel)
    reporter, stop = SilentReporter(), StopSignal()
    made = supervised.supervised_run(config, inputs, folder / "model", data_parallel, reporter, stop)
    assert made is not None
    return made
