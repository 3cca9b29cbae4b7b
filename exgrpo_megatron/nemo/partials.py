"""Recipes as `run.Partial`: made from recipe files, changed, written to NeMo-Run's YAML and read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemo_run as run
from nemo_run.core.serialization.yaml import YamlSerializer

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.nemo.task import section, train
from exgrpo_megatron.recipe import given_keys, parse_recipe
from exgrpo_megatron.recipe_yaml import parse_yaml

_TARGET, _PARTIAL = "_target_", "_partial_"
"""Keys by which NeMo-Run's YAML says what is called."""

_SECTION = f"{section.__module__}.{section.__qualname__}"


def recipe(path: str | Path, overrides: Sequence[str] = (), python: str = "") -> run.Partial:
    """The recipe at `path` as a task of NeMo-Run, whose keys are attributes: `task.config.grpo.max_num_steps = 10`.

    Only keys that the file and the overrides set are in it; others have their defaults where it is launched.

    Args:
        path: a recipe, or a configuration of NeMo-RL.
        overrides: `section.key=value`, as on the command line.
        python: that trains, as the machines see it. Empty: the one that runs the task.

    Raises:
        ConfigError: it is no recipe.
    """
    return run.Partial(train, config=_structured(given_keys(path, overrides)), python=python)


def resolve(task: run.Partial) -> Config:
    """The whole recipe of a task, checked.

    Raises:
        ConfigError: a key or value that is none; names every one.
    """
    return parse_recipe(_plain(task.config), source="task")


def write_yaml(task: run.Partial, path: str | Path) -> None:
    """The task as NeMo-Run writes it."""
    replace_text(Path(path), YamlSerializer().serialize(task))


def is_nemo_run_yaml(path: str | Path) -> bool:
    """Whether a file says, as NeMo-Run's YAML does, what is to be called."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # the reader of recipes says what is wrong with it
        return False
    return any(line.startswith(f"{_TARGET}:") for line in lines)


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> run.Partial:
    """A task from NeMo-Run's YAML, exactly as written: texts stay texts, which NeMo-Run's own reader may evaluate.

    Raises:
        ConfigError: it is another function's, calls something, or is no recipe.
    """
    try:
        given = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    target = given.get(_TARGET)
    if target != f"{train.__module__}.{train.__qualname__}":
        raise ConfigError(f"{path}: _target_ = {target!r}: only tasks of exgrpo_megatron.nemo are launched here")
    unknown = sorted(set(given) - {_TARGET, _PARTIAL, "config", "python", "folder"})
    if unknown:
        raise ConfigError(f"{path}: {', '.join(unknown)}: a task has config, python and folder")
    config, texts = given.get("config") or {}, {name: given.get(name) or "" for name in ("python", "folder")}
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: config = {config!r}: must be a recipe's sections")
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {name} = {value!r}: must be a path")
    raw = given_keys(_without_targets(config, f"{path}: config"), overrides)
    return run.Partial(train, config=_structured(raw), **texts)


def _structured(value: Any) -> Any:
    """Sections as something whose keys are attributes; fiddle would read anything else with keys as a plain value."""
    if not isinstance(value, dict):
        return value
    return run.Config(section, **{name: _structured(inner) for name, inner in value.items()})


def _plain(node: Any) -> Any:
    """What `_structured` was given."""
    if not isinstance(node, run.Config):
        return node
    return {name: _plain(value) for name, value in node.__arguments__.items()}


def _without_targets(node: Any, where: str) -> Any:
    if not isinstance(node, dict):
        return node
    target = node.get("_factory_", node.get(_TARGET, _SECTION))
    if target != _SECTION:
        raise ConfigError(f"{where}: {target!r}: only sections of a recipe can stand here ({_SECTION})")
    return {name: _without_targets(value, f"{where}.{name}") for name, value in node.items() if name != _TARGET}
