"""What is found of the optional GPU packages: on broken ones laid on disk, that break as the real ones do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exgrpo_megatron.accelerators import Accelerators, Library, age_fault, check_library

ENGINE = ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8", "transformer_engine.pytorch.optimizers")

# The wheel of transformer-engine on package indexes has neither its libraries nor its torch part. Version 2.20.2 then
# raises this from transformer_engine.common, which transformer_engine imports first.
META_PACKAGE = {
    "__init__.py": "import transformer_engine.common\n",
    "common/__init__.py": "raise RuntimeError('Found empty `transformer-engine` meta package installed.')\n",
    "pytorch/__init__.py": "",
}
# With its libraries, but without the torch part, the top imports with a warning, and what is below it does not.
NO_TORCH_PART = {
    "__init__.py": "try:\n    from . import pytorch\nexcept FileNotFoundError:\n    pass\n",
    "pytorch/__init__.py": "raise FileNotFoundError('Could not find shared object file: transformer_engine_torch')\n",
}
WHOLE = {
    "__init__.py": "",
    "pytorch/__init__.py": "",
    "pytorch/fp8.py": "",
    "pytorch/optimizers.py": "",
}


def install(folder: Path, code: dict[str, str], version: str = "2.20.2", name: str = "transformer_engine") -> None:
    """Lay a package and its metadata on disk as pip would."""
    for file, text in code.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched first, while no package of that name is known yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (META_PACKAGE, "RuntimeError: Found empty `transformer-engine` meta package installed."),
        (NO_TORCH_PART, "FileNotFoundError: Could not find shared object file: transformer_engine_torch"),
        (WHOLE | {"pytorch/__init__.py": "raise OSError('libcudart.so.13')"}, "OSError: libcudart.so.13"),
        (WHOLE | {"pytorch/__init__.py": "assert False, 'torch too old'"}, "AssertionError: torch too old"),
        # Its search for CUDA's libraries, where there are none: grep's exit code is 1.
        (
            WHOLE | {"__init__.py": "import subprocess\nsubprocess.check_output('true | grep libnvrtc', shell=True)"},
            "CalledProcessError: Command 'true | grep libnvrtc' returned non-zero exit status 1.",
        ),
        (
            WHOLE | {"pytorch/optimizers.py": "raise ImportError('undefined symbol\\nmore')"},
            "ImportError: undefined symbol",
        ),
    ],
)
def test_whatever_a_broken_package_raises_is_its_fault(on_path: Path, code: dict[str, str], fault: str):
    install(on_path, code)
    found = check_library("transformer-engine", ENGINE)
    assert found == Library("transformer-engine", "2.20.2", fault)
    assert not found.works


def test_a_package_whose_modules_all_import_works(on_path: Path):
    install(on_path, WHOLE)
    assert check_library("transformer-engine", ENGINE, (2, 5)) == Library("transformer-engine", "2.20.2")


def test_an_old_version_is_not_imported(on_path: Path):
    install(on_path, META_PACKAGE, "1.13.0")
    assert check_library("transformer-engine", ENGINE, (2, 5)).fault == "older than 2.5"


@pytest.mark.parametrize(
    ("version", "fault"),
    [("2.5", None), ("2.20.2+abc", None), ("2.4.0", "older than 2.5"), ("of unknown version", None)],
)
def test_versions_are_compared_by_their_numbers(version: str, fault: str | None):
    assert age_fault(version) == fault


def test_what_is_not_there_is_absent_and_not_broken():
    assert check_library("no-such-library", ("no_such_library.part",)) == Library("no-such-library")


def test_processes_without_a_gpu_are_alike_whatever_is_installed():
    half = Library("transformer-engine", "2.20.2", "RuntimeError: half")
    assert Accelerators(None, half).fingerprint() == Accelerators(None).fingerprint()
    assert Accelerators("H200", half).fingerprint() != Accelerators("H200").fingerprint()


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


MEGATRON_RUNS = """
import logging; logging.basicConfig(format="%(message)s")
{before}
import exgrpo_megatron.policy.layers
from megatron.core import fp8_utils, optimizer, utils
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import random
print(transformer_engine.HAVE_TE, fp8_utils.HAVE_TE, random.HAVE_TE, optimizer.USING_PYTORCH_OPTIMIZER)
"""
AS_ON_A_GPU = """
from exgrpo_megatron.accelerators import Accelerators, check_library, hide_unusable
hide_unusable(Accelerators("some GPU", check_library("transformer-engine", {engine!r})))
"""


@pytest.mark.parametrize(
    ("code", "before", "said"),
    [
        (
            META_PACKAGE,
            AS_ON_A_GPU,
            "does not work (RuntimeError: Found empty `transformer-engine` meta package installed.)",
        ),
        pytest.param(WHOLE, "", "has no GPU to run on", marks=pytest.mark.slow),
    ],
)
def test_megatron_runs_beside_a_package_that_cannot_be_used(
    tmp_path: Path, code: dict[str, str], before: str, said: str
):
    """Stock Megatron-Core does not even import beside the first, and takes the second's Adam, which is none."""
    install(tmp_path, code)
    result = run(MEGATRON_RUNS.format(before=before.format(engine=ENGINE)), tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", "False", "False", "True"]
    assert f"transformer-engine 2.20.2 {said}: it is left out, as if it were not installed" in result.stderr


def test_without_a_gpu_megatron_does_not_load_the_compiler_of_torch_and_others_still_can(tmp_path: Path):
    code = """
import sys
import exgrpo_megatron.policy.actor
print("torch._inductor.compile_fx" in sys.modules)
import torch
print(torch.compile.__module__, torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["False", "torch 2.0"]
