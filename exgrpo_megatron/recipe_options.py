"""Every recipe key with its default, unit and meaning, from the schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from exgrpo_megatron.config import Config
from exgrpo_megatron.recipe_yaml import yaml_text


@dataclass(frozen=True)
class Option:
    """One recipe key, as `exgrpo options` shows it."""

    name: str
    default: str
    unit: str
    meaning: str
    """With the values there are, where they can be listed."""


def options(prefix: str = "") -> list[Option]:
    """Every recipe key that starts with `prefix`, in the order of the schema."""
    return [option for option in _walk(Config, "") if option.name.startswith(prefix)]


def _walk(section: type[BaseModel], prefix: str, defaults: BaseModel | None = None) -> Iterator[Option]:
    """The keys under a section; `defaults` are the values it has where a recipe leaves the whole section out."""
    for name, field in section.model_fields.items():
        nested = _nested_section(field)
        default = field.default if defaults is None else getattr(defaults, name)
        if nested is not None:
            by_name = "<name>." if get_origin(field.annotation) is dict else ""
            yield from _walk(nested, f"{prefix}{name}.{by_name}", default if isinstance(default, BaseModel) else None)
        else:
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            yield Option(prefix + name, _default_text(default), unit, _meaning(field))


def _meaning(field: FieldInfo) -> str:
    """The description, and the values of a key that admits only some and does not explain each."""
    meaning = field.description or ""
    choices = [value for value in _literals(field.annotation) if isinstance(value, str)]
    if not choices or all(choice in meaning for choice in choices):
        return meaning
    return f"{meaning}; one of {', '.join(choices)}"


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literals(part)]


def _nested_section(field: FieldInfo) -> type[BaseModel] | None:
    for candidate in _alternatives(field.annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _alternatives(annotation: Any) -> Iterable[Any]:
    return get_args(annotation) or (annotation,)


def _default_text(default: Any) -> str:
    return "required" if default is PydanticUndefined or default is ... else yaml_text(default)
