"""The names by which recipes call functions, of functions that a script hands over."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from exgrpo_megatron.errors import ConfigError


def with_names(value: Any, key: str) -> Any:
    """A value of a recipe with every function in it replaced by its name, and paths by texts; `key` is the dotted key
    of the value.

    Raises:
        ConfigError: as `function_name`.
    """
    if isinstance(value, Mapping):
        return {name: with_names(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_names(inner, key) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return function_name(value, key) if callable(value) else value


def function_name(function: Any, key: str) -> str:
    """`package.module:function`, or `path/of/file.py:function` for a function of the script that runs, or of a module
    or package beside it: other processes import it by that.

    Raises:
        ConfigError: it is no function at the top level of a module, or its module has no file that ends in .py.
    """
    if not isinstance(function, FunctionType):
        raise _refused(function, key, f"is a {type(function).__name__}, not a function that `def` makes")
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    if "<" in name or "." in name:
        raise _refused(function, key, f"is {name}, not at the top level of its module")
    if getattr(module, name, None) is not function:
        raise _refused(function, key, f"is not what {function.__module__}.{name} is (a decorator may have replaced it)")
    assert module is not None
    return f"{_place(module, function, key)}:{name}"


def _place(module: ModuleType, function: Any, key: str) -> str:
    script = sys.modules["__main__"]
    if module is script and script.__spec__ is not None:  # python -m package.module
        return script.__spec__.name
    file = getattr(module, "__file__", None)
    if module is not script and not _beside(script, module):
        return module.__name__
    if file is None or not Path(file).is_file():  # a script that is read from standard input is of "<stdin>"
        raise _refused(function, key, "was typed in, and no file has it")
    if not file.endswith(".py"):
        raise _refused(function, key, f"is in {file}, whose name must end in .py")
    return _short(Path(file))


def _beside(script: ModuleType, module: ModuleType) -> bool:
    """Whether Python finds a module, or the package it is in, only because that lies beside the script, where other
    processes do not look."""
    own, outermost = getattr(script, "__file__", None), sys.modules.get(module.__name__.partition(".")[0])
    if own is None or outermost is None:
        return False
    folder, file = Path(own).resolve().parent, getattr(outermost, "__file__", None)
    if not hasattr(outermost, "__path__"):
        return file is not None and Path(file).resolve().parent == folder
    # A package without a file of its own is known by its name alone, which does for the current folder.
    here = file is None and folder == Path.cwd().resolve()
    return not here and any(Path(place).resolve().parent == folder for place in outermost.__path__)


def _short(file: Path) -> str:
    """Relative to the current folder where it is in it, as paths of recipes are."""
    path = os.path.relpath(file.resolve())
    return str(file.resolve()) if path.startswith("..") else path


def _refused(function: Any, key: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{key} = {function!r}: {reason}; other processes import the function, so it must be defined by `def` at the "
        "top level of a module or script (or be named as text: package.module:function, file.py:function)"
    )
