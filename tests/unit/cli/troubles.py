"""What goes wrong, done on purpose: docs/troubleshooting.md is held to what is printed then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_project import Result

Run = Callable[..., Result]
Trouble = Callable[["Place"], str]


@dataclass(frozen=True)
class Place:
    """The current folder, with a small recipe and its questions, and with a finished run where that was asked for."""

    exgrpo: Run
    folder: Path
    patch: pytest.MonkeyPatch
    caplog: pytest.LogCaptureFixture
    model: Path
    """A Hugging Face folder; to be copied, not changed."""

    def fails(self, *args: object) -> str:
        """What a command says that ends with exit code 2, and what it had warned of."""
        result = self.exgrpo(*args)
        assert result.code == 2, result
        assert "Traceback" not in result.err
        return result.out + result.err

    def stopped(self, *args: object) -> str:
        """What a training says that is stopped where its first step would begin."""
        self.patch.setattr("exgrpo_megatron.session.TrainingRun.run", _interrupt)
        return self.exgrpo(*args).out

    def copy_model(self, name: str, **config: object) -> Path:
        """The model as a folder here, with other settings in its config.json."""
        shutil.copytree(self.model, name)
        path = Path(name) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return Path(name)

    def logged(self) -> str:
        """What this process warned of, as its handler would print it."""
        return "\n".join(f"{record.levelname.lower()}: {record.getMessage()}" for record in self.caplog.records)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


TROUBLES: dict[str, tuple[Trouble, str]] = {}
"""By the name in docs/troubleshooting.md: what to do, and the fixture of its folder."""


def trouble(function: Trouble) -> Trouble:
    """Register one that begins in a folder with a recipe alone."""
    TROUBLES[function.__name__] = (function, "project")
    return function


def trouble_of_a_run(function: Trouble) -> Trouble:
    """Register one that begins with a finished run."""
    TROUBLES[function.__name__] = (function, "trained")
    return function


def error_of(kind: type[BaseException], action: Callable[[], Any]) -> str:
    """The message of what `action` raises, as the program would print it."""
    with pytest.raises(kind) as caught:
        action()
    return f"error: {caught.value}"
