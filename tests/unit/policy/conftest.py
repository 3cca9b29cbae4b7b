"""The process group of one."""

from __future__ import annotations

import pytest

from exgrpo_megatron.policy.distributed import DataParallel


@pytest.fixture
def group(data_parallel: DataParallel) -> DataParallel:
    return data_parallel
