"""Fixtures shared by all tests."""

import pytest


@pytest.fixture(scope="session")
def data_parallel():
    """The process group of this test process, as an unlaunched run has it."""
    from exgrpo_megatron.config import ClusterConfig, PolicyConfig
    from exgrpo_megatron.policy.distributed import initialize

    comm = initialize(PolicyConfig(model_name="embedded:chain-qwen2"), ClusterConfig(), seed=0)
    yield comm
    comm.shutdown()
