"""For the tests on a GPU that need more than torch, triton, pytest and jaxtyping."""

from __future__ import annotations

import importlib.util

import pytest

MODULES = ("megatron.core", "numpy", "pydantic", "safetensors", "transformers")


def skip_module_without_it() -> None:
    """Call before the first import of `exgrpo_megatron.config`, `exgrpo_megatron.policy` and what they need.

    Nothing is imported: beside a transformer-engine that is there in part, `import megatron.core` raises anything.
    """
    absent = [name for name in MODULES if not _found(name)]
    if absent:
        pytest.skip(f"the actor needs {', '.join(absent)}", allow_module_level=True)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it is part of is not there
        return False
