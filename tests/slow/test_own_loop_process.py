"""The example of a loop of one's own as it is started: without Megatron and without a process group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import runpy, sys
sys.modules["megatron"] = None   # an import of it fails
runpy.run_path("examples/own_loop.py", run_name="__main__")
import torch
assert not torch.distributed.is_initialized()
"""

pytestmark = pytest.mark.slow


def test_it_needs_no_megatron_and_no_process_group():
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "conversion"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "1440"
    assert float(last[1].rstrip("%")) > 90
