"""The process group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exgrpo_megatron.config import ClusterConfig, PolicyConfig
from exgrpo_megatron.policy.distributed import DataParallel, initialize


@pytest.fixture(scope="module")
def group() -> Iterator[DataParallel]:
    """Process group of one, for all tests of a file."""
    joined = initialize(PolicyConfig(model_name="unused"), ClusterConfig(), seed=0)
    yield joined
    joined.shutdown()
