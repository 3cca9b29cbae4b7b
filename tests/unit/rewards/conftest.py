from collections.abc import Callable, Iterator

import psutil
import pytest

from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.rewards.verifier import MathVerifier


@pytest.fixture(scope="package")
def verifier() -> Iterator[MathVerifier]:
    """Two workers with the default rules and limits, shared by the tests that change nothing about them."""
    with MathVerifier(MathEnvConfig(num_workers=2)) as verifier:
        yield verifier


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """A function that lists the processes under this one that were not there when the test began."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    return lambda: [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
