"""Fixtures shared by all tests."""

import hashlib
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]


LONGEST = (
    "test_quickstart.py",
    "test_cli_two_ranks.py",
    "test_layouts.py",
    "test_cli_process.py",
    "test_vllm_learning.py",
    "test_vllm_layouts.py",
    "test_compiled_for_hopper.py",
)
"""Files that are begun first, in this order, so that parallel test processes (--dist loadfile) end together."""


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


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
def trained_once(request):
    """A folder for models that tests start from and say nothing about: trained once, found again by all test processes
    and by later sessions of the same code. It is in pytest's cache; other code's are removed."""
    import importlib.metadata

    digest = hashlib.sha256(" ".join(importlib.metadata.version(n) for n in ("torch", "megatron-core")).encode())
    sources = [path for part in ("exgrpo_megatron", "kernels", "conversion") for path in (ROOT / part).rglob("*.py")]
    for path in sorted([*sources, ROOT / "recipes" / "quickstart.yaml", Path(__file__)]):
        digest.update(path.read_bytes())
    kept = request.config.cache.mkdir("trained_once")
    folder = kept / digest.hexdigest()[:16]
    with FileLock(kept / "lock"):
        for other in kept.iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other)
        folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def half_trained_model(trained_once, tmp_path_factory, data_parallel):
    """A Hugging Face folder: the quickstart's model after 150 supervised steps, which solves some short chains."""
    from exgrpo_megatron import run_inputs, supervised
    from exgrpo_megatron.parts import SilentReporter
    from exgrpo_megatron.recipe import load_recipe
    from exgrpo_megatron.stop import StopSignal

    folder = trained_once / "half_trained"
    config = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        [
            "sft.max_num_steps=150", "sft.generator_worked_share=0.8",
            f"logger.log_dir={tmp_path_factory.mktemp('half_trained')}",
        ],
    )  # fmt: skip
    with FileLock(trained_once / "half_trained.lock"):
        if not folder.exists():  # it appears whole, by renaming
            inputs = run_inputs.load_inputs(config, data_parallel)
            made = supervised.supervised_run(config, inputs, folder, data_parallel, SilentReporter(), StopSignal())
            assert made == folder
    return folder
