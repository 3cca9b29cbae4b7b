"""What the tests with tools of others share: the marks of a test that needs a package outside cpu.lock."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def needs(*modules: str) -> list[pytest.MarkDecorator]:
    """Marks of a test that imports `modules`: run by `make test-others` only, skipped where one is not installed."""
    absent = [module for module in modules if find_spec(module) is None]
    reason = f"{', '.join(absent)} not installed: make setup-others"
    return [pytest.mark.others, pytest.mark.skipif(bool(absent), reason=reason)]
