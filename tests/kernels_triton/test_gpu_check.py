"""scripts/gpu_check.py without a GPU: everything it does to measure, on small sizes in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from interpreted import needs_interpreter

pytestmark = needs_interpreter

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"
MEASURED = {
    "copy on the device",
    "statistics (K1), one read",
    "loss and gradient (K2), one read and one write",
    "K1 + K2 over the copy",
    "K1 + K2",
    "three products alone",
    "linear form, loss and gradients",
    "linear form over the three products",
    "linear form, log-probs and entropies only",
    "plain torch over the linear form",
    "all of this",
}
"""Memory is measured on GPUs alone."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_script_measures_what_it_says_and_writes_both_forms(tmp_path: Path):
    done = run("--device", "cpu", "--small", "--no-tests", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    values = {result["name"]: result["value"] for result in report["results"]}
    assert set(values) == MEASURED
    assert all(value > 0 for value in values.values())
    assert report["environment"]["card"] == "none: CPU, interpreted"
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(MEASURED), "a heading and a line for each"
    # Bytes over seconds: 6 rows of 512 columns of 2 bytes, read twice and written once, over the time given for both.
    moved = 3 * 6 * 512 * 2 / (values["K1 + K2"] / 1e3) / 1e9
    assert values["K1 + K2 over the copy"] == pytest.approx(moved / values["copy on the device"], rel=1e-6)


def test_the_loss_is_tested_where_nothing_but_what_the_script_needs_is_installed():
    """The rest of the project hidden: its tests on a GPU are skipped, those of the loss are found."""
    hidden = ["megatron", "numpy", "pydantic", "safetensors", "transformers"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden!r}))
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--collect-only", "tests/gpu"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=SCRIPT.parents[1], check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_hidden_states_to_loss_agree_with_float64" in done.stdout
    said = re.findall(r"SKIPPED \[(\d)\] .*: the actor needs megatron.core, numpy, pydantic", done.stdout)
    assert said == ["2"], done.stdout


def test_goals_are_met_or_missed_on_the_side_they_are_meant(script: ModuleType):
    assert script.Result("a", 0.9, goal=0.85, larger_is_better=True).verdict == "at least 0.85: met"
    assert script.Result("a", 0.8, goal=0.85, larger_is_better=True).verdict == "at least 0.85: missed"
    assert script.Result("a", 1.2, goal=1.3).verdict == "at most 1.3: met"
    assert script.Result("a", 1.4, goal=1.3).verdict == "at most 1.3: missed"
    assert script.Result("a", 1.4).verdict == ""


def test_a_machine_without_a_gpu_is_told_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 2
    assert "torch sees no NVIDIA GPU" in done.stderr
