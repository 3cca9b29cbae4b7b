"""The optional GPU packages that Megatron-Core takes up wherever it finds them: which of them work in this process.

Megatron-Core tries `import transformer_engine` (and apex) in some twenty modules, and expects an ImportError, in one a
ModuleNotFoundError, where it cannot be used. A package that is there in part raises something else (RuntimeError,
OSError, FileNotFoundError), and then not even `import megatron.core` works; one that is whole but has no GPU fails at
the first optimiser step. `hide_unusable` turns either into a package that is not there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

OLDEST_TRANSFORMER_ENGINE = (2, 5)
"""Has every FP8 recipe that Megatron-Core's `fp8_recipe` can mean here."""

GRADIENT_EXTENSION = "fused_weight_gradient_mlp_cuda"
"""apex's CUDA module that adds a weight's gradient to a buffer as it is made."""


@dataclass(frozen=True)
class Library:
    """An optional package as it was found."""

    name: str
    version: str | None = None
    """None: it is not installed."""
    fault: str | None = None
    """Why it does not work, in one line; None: it does, or is not there."""

    @property
    def works(self) -> bool:
        return self.version is not None and self.fault is None

    def describe(self) -> str:
        """Name, version and what is wrong, for the middle of a sentence."""
        if self.version is None:
            return f"{self.name} is not installed"
        return f"{self.name} {self.version}" + (f" does not work ({self.fault})" if self.fault else "")


@dataclass(frozen=True)
class Accelerators:
    """What there is to compute with beside torch."""

    gpu: str | None
    """Name of the CUDA device; None: there is none that torch can use."""
    transformer_engine: Library = Library("transformer-engine")
    apex: Library = Library("apex")
    triton: Library = Library("triton")
    gradient_extension: bool = False
    """Whether `GRADIENT_EXTENSION` can be imported."""
    fp8_faults: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """By fp8_recipe, why this GPU and CUDA cannot compute it, as Transformer Engine says."""

    def fingerprint(self) -> str:
        """The same on two processes that can run the same model together."""
        if self.gpu is None:
            return "no GPU"
        parts = (library.describe() for library in (self.transformer_engine, self.apex, self.triton))
        extension = f"{GRADIENT_EXTENSION} {'works' if self.gradient_extension else 'does not work'}"
        return "; ".join(["a GPU", *parts, extension])


@functools.cache
def installed() -> Accelerators:
    """What this process can use. The GPU packages are imported, so only where there is a GPU."""
    gpu = _gpu()
    if gpu is None:
        engine, apex, triton = (_unchecked(*package) for package in _PACKAGES)
        return Accelerators(None, engine, apex, triton)
    engine, apex, triton = (check_library(*package) for package in _PACKAGES)
    return Accelerators(
        gpu,
        engine,
        apex,
        triton,
        gradient_extension=_import_fault(GRADIENT_EXTENSION) is None,
        fp8_faults=_fp8_faults() if engine.works else {},
    )


def hide_unusable(found: Accelerators | None = None) -> None:
    """Make Megatron-Core see only those packages that work here; say of each other one that it is left out, and why.

    Call before the first import of `megatron.core`. A package that is hidden is hidden from the whole process. `found`:
    what there is; None: what `installed` says.
    """
    found = found or installed()
    for library, module in ((found.transformer_engine, "transformer_engine"), (found.apex, "apex")):
        if library.version is None or (library.works and found.gpu):
            continue
        reason = library.describe() if library.fault else f"{library.describe()} has no GPU to run on"
        logger.warning("%s: it is left out, as if it were not installed (exgrpo doctor tells more)", reason)
        hide(module)


@contextlib.contextmanager
def uncompiled_without_gpu(found: Accelerators | None = None) -> Iterator[None]:
    """Let `torch.compile` return functions as they are while the block runs, where there is no GPU to compile them for.

    For imports of `megatron.core`: it decorates what only a GPU gains by, and for the first such function torch loads
    its compiler, a third of the time a process on CPUs takes to start. `found` as in `hide_unusable`.
    """
    import torch  # noqa: PLC0415 (as in _gpu)

    if (found or installed()).gpu is not None:
        yield
        return
    compiled = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment] # a function of many forms, of which two are used
    try:
        yield
    finally:
        torch.compile = compiled


def hide(module: str) -> None:
    """Let `import module`, and that of everything under it, raise ModuleNotFoundError from now on."""
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        del sys.modules[name]
    sys.modules[module] = None  # type: ignore[assignment] # Python's own way to say so


def check_library(name: str, modules: Sequence[str], oldest: tuple[int, int] | None = None) -> Library:
    """The package after importing what Megatron-Core imports of it, `modules`; nothing it raises comes through."""
    library = _unchecked(name, modules)
    if library.version is None:
        return library
    if oldest is not None and (fault := age_fault(library.version, oldest)):
        return Library(name, library.version, fault)
    fault = next((fault for module in modules if (fault := _import_fault(module)) is not None), None)
    return Library(name, library.version, fault)


def age_fault(version: str, oldest: tuple[int, int] = OLDEST_TRANSFORMER_ENGINE) -> str | None:
    """What is wrong with a version that is too old; None: nothing. An unknown version passes for a new one."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(map(str.isdigit, numbers)):
        return None
    return f"older than {oldest[0]}.{oldest[1]}" if (int(numbers[0]), int(numbers[1])) < oldest else None


_PACKAGES: tuple[tuple[str, tuple[str, ...], tuple[int, int] | None], ...] = (
    (
        "transformer-engine",
        ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8", "transformer_engine.pytorch.optimizers"),
        OLDEST_TRANSFORMER_ENGINE,
    ),
    ("apex", ("apex.optimizers", "apex.multi_tensor_apply", "amp_C"), None),
    ("triton", ("triton",), None),
)
"""Name of the distribution, modules, oldest version."""

_IMPORT_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, NameError, OSError,
    RuntimeError, SyntaxError, SystemError, TypeError, ValueError, Warning,
    subprocess.SubprocessError,  # Transformer Engine asks ldconfig, through a shell, for CUDA's libraries
)  # fmt: skip
"""Anything that running a module may raise but an interruption."""


def _unchecked(name: str, modules: Sequence[str], oldest: tuple[int, int] | None = None) -> Library:
    """The package by its metadata alone."""
    del oldest
    package = modules[0].split(".")[0]
    if importlib.util.find_spec(package) is None:
        return Library(name)
    try:
        return Library(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Library(name, "of unknown version")


def _import_fault(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except _IMPORT_ERRORS as error:
        first_line = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first_line[:200]}"
    return None


def _uncompiled(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    return _uncompiled if function is None else function


def _gpu() -> str | None:
    import torch  # noqa: PLC0415 (the doctor reports a torch that does not import)

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _fp8_faults() -> dict[str, str]:
    state = importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager
    answers = {
        "tensorwise": state.is_fp8_available(),
        "blockwise": state.is_fp8_block_scaling_available(),
        "mxfp8": state.is_mxfp8_available(),
    }
    return {recipe: reason for recipe, (available, reason) in answers.items() if not available}
