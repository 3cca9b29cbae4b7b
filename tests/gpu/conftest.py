"""Options of the tests on a GPU: another device and smaller sizes, by which the same code can be tried without one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

# The exact numbers and the inputs are those of the interpreted tests, the actor's model that of its CPU tests.
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "kernels_triton"), str(TESTS / "unit" / "policy")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-device", default="cuda", help="cpu: interpreted, with TRITON_INTERPRET=1")
    parser.addoption("--small", action="store_true", help="sizes for an interpreter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run; a test that asks for it is skipped where that is not to be had."""
    name = request.config.getoption("--kernel-device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU that torch can use")
    if name == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("--kernel-device cpu needs TRITON_INTERPRET=1")
    pytest.importorskip("triton")
    return torch.device(name)


@pytest.fixture(scope="session")
def small(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--small")
