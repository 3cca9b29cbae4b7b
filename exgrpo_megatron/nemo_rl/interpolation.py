"""`${...}` in recipes, as OmegaConf reads it, with the resolvers that NeMo-RL's files use; all others are refused."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any

import yaml

from exgrpo_megatron.errors import ConfigError

Path = tuple[str | int, ...]

ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
}
"""NeMo-RL's own resolvers: of two numbers."""


def resolve(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` with `${section.key}`, `${.sibling}`, `${oc.env:NAME,default}`, `${mul:a,b}` and the like replaced.

    Raises:
        ConfigError: a reference to nothing, a circle, an unknown resolver, a variable that is not set, or `???`.
    """
    return _Resolver(raw).value(raw, ())


class _Resolver:
    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self._open: list[Path] = []

    def value(self, node: Any, path: Path) -> Any:
        """`node`, which stands at `path`, with everything in it replaced."""
        if isinstance(node, dict):
            return {name: self.value(inner, (*path, name)) for name, inner in node.items()}
        if isinstance(node, list):
            return [self.value(inner, (*path, index)) for index, inner in enumerate(node)]
        if node == "???":
            raise ConfigError(f"{_dotted(path)} = ???: has to be given")
        if not isinstance(node, str) or "${" not in node:
            return node
        if path in self._open:
            circle = [*self._open[self._open.index(path) :], path]
            raise ConfigError(f"{_dotted(path)}: interpolations form a circle: {' -> '.join(map(_dotted, circle))}")
        self._open.append(path)
        try:
            return self._text(node, path)
        finally:
            self._open.pop()

    def _text(self, text: str, path: Path) -> Any:
        """A text with interpolations: the value itself if it is nothing but one, else a text."""
        parts: list[Any] = []
        rest = text
        while (start := rest.find("${")) >= 0:
            if rest[:start].endswith("\\"):
                raise ConfigError(f"{_dotted(path)} = {text!r}: escaped interpolations are not supported")
            end = _closing(rest, start, path)
            parts += [rest[:start], self._interpolation(rest[start + 2 : end].strip(), path)]
            rest = rest[end + 1 :]
        parts = [part for part in [*parts, rest] if not (isinstance(part, str) and part == "")]
        return parts[0] if len(parts) == 1 else "".join(map(str, parts))

    def _interpolation(self, inside: str, path: Path) -> Any:
        found = re.match(r"([A-Za-z_][\w.]*):", inside)
        if found:
            return self._call(found[1], _arguments(inside[found.end() :]), path)
        if not re.fullmatch(r"\.*[\w-]+(\.[\w-]+)*", inside):
            raise ConfigError(f"{_dotted(path)}: ${{{inside}}} is no reference of the form section.key or .key")
        return self._reference(inside, path)

    def _reference(self, name: str, path: Path) -> Any:
        dots = len(name) - len(name.lstrip("."))
        base = path[: len(path) - dots] if dots else ()
        here: Any = self._raw
        target: Path = ()
        for part in (*base, *name.lstrip(".").split(".")):
            if isinstance(here, str) and "${" in here:
                here = self.value(here, target)
            step = int(part) if isinstance(here, list) and str(part).isdigit() else part
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                raise ConfigError(f"{_dotted(path)}: ${{{name}}}: there is no {_dotted((*target, part))}") from None
            target = (*target, step)
        return self.value(here, target)

    def _call(self, name: str, arguments: list[str], path: Path) -> Any:
        values = [self._argument(argument, path) for argument in arguments]
        if name == "oc.env":
            return _variable(values, path)
        if name not in ARITHMETIC:
            known = ", ".join(["oc.env", *ARITHMETIC])
            raise ConfigError(f"{_dotted(path)}: no resolver {name!r} in ${{{name}:...}}; there are {known}")
        if len(values) != 2 or not all(isinstance(value, int | float) for value in values):
            raise ConfigError(f"{_dotted(path)}: ${{{name}:...}} takes two numbers, found {values}")
        try:
            result = ARITHMETIC[name](*values)
        except (ArithmeticError, ValueError) as error:
            raise ConfigError(f"{_dotted(path)}: ${{{name}:...}} of {values}: {error}") from None
        if isinstance(result, float) and not math.isfinite(result):
            raise ConfigError(f"{_dotted(path)}: ${{{name}:...}} of {values} is {result}")
        return result

    def _argument(self, text: str, path: Path) -> Any:
        if "${" in text:
            return self._text(text, path)
        try:
            return yaml.safe_load(text) if text else ""
        except yaml.YAMLError:
            return text


def _variable(values: list[Any], path: Path) -> Any:
    """An environment variable, which the file asks for by name: a text, or the default."""
    if len(values) not in (1, 2):
        raise ConfigError(f"{_dotted(path)}: ${{oc.env:...}} takes a name and a default, found {values}")
    name = str(values[0])
    if name in os.environ:
        return os.environ[name]
    if len(values) == 1:
        raise ConfigError(f"{_dotted(path)}: ${{oc.env:{name}}}: the environment variable {name} is not set")
    return values[1]


def _closing(text: str, start: int, path: Path) -> int:
    """Where the `${` at `start` ends."""
    depth = 0
    for index in range(start, len(text)):
        if text.startswith("${", index):
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    raise ConfigError(f"{_dotted(path)} = {text!r}: a ${{ is not closed")


def _arguments(text: str) -> list[str]:
    """Split at the commas outside of inner interpolations."""
    parts, depth = [""], 0
    for index, char in enumerate(text):
        depth += text.startswith("${", index) - (char == "}" and depth > 0)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
