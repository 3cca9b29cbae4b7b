"""Which implementation of the passes over logits is taken."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exgrpo_kernels import dispatch, torch_kernels

MODULES = ("triton", "exgrpo_kernels.triton")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is searched first, while neither triton nor what needs it is known yet."""
    known = {name: module for name, module in sys.modules.items() if name.startswith(MODULES)}
    for name in known:
        del sys.modules[name]
    dispatch.triton_kernels.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]
    sys.modules.update(known)
    dispatch.triton_kernels.cache_clear()


@pytest.mark.parametrize("error", ["ImportError('libtriton.so')", "RuntimeError('no driver')", "OSError('libcuda')"])
def test_a_triton_that_does_not_import_is_warned_of_once_and_left(
    on_path: Path, caplog: pytest.LogCaptureFixture, error: str
):
    (on_path / "triton").mkdir()
    (on_path / "triton" / "__init__.py").write_text(f"raise {error}\n")
    assert dispatch.triton_kernels() is None
    assert dispatch.triton_kernels() is None
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"triton does not import ({error.split('(')[0]}: ")
    assert said.endswith("log-probs and losses on this GPU run in plain torch, slower")


def test_logits_on_a_cpu_are_never_triton_s():
    assert dispatch.row_kernels(torch.zeros(2, 3)) is torch_kernels
