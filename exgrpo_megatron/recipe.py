"""Recipes on disk: loading, `defaults:`, `key=value` overrides, and what differs between two."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from exgrpo_megatron.addresses import without_credentials
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.functions import with_names
from exgrpo_megatron.nemo_rl import is_nemo_rl, translate
from exgrpo_megatron.recipe_errors import explain, shown
from exgrpo_megatron.recipe_yaml import dump_yaml, parse_yaml


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """A recipe, resolved and checked: every key has its value.

    Args:
        recipe: path of a YAML file, or its content as a mapping; the files that `defaults:` names (from the file's
            folder, else from the current one) are beneath it.
        overrides: what stands above it: `section.key=value` texts as on the command line, or a mapping of dotted keys
            to values. A mapping as a value replaces the whole section. A value may be a function (of a module or of the
            script that runs) where the key names one: `env.reward_function`, `data.train.source_function`.

    Raises:
        ConfigError: no such file, or keys or values that break a rule; it names every one.
    """
    return load_with_report(recipe, overrides)[0]


def load_with_report(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[Config, str | None]:
    """The same, and what became of its keys where the file is a configuration of NeMo-RL (docs/nemo.md), else None."""
    raw, report = _read_given(recipe, overrides)
    return parse_recipe(raw, source=_source(recipe)), report


def given_keys(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> dict[str, Any]:
    """What the recipe, those beneath it and the overrides set, and nothing else, as nested dictionaries; raises
    ConfigError where it is no recipe."""
    raw, _ = _read_given(recipe, overrides)
    parse_recipe(raw, source=_source(recipe))
    return raw


def _read_given(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    if isinstance(recipe, Mapping):
        raw = _over_defaults(with_names(recipe, ""), Path("recipe"), ())
    else:
        raw = _read_with_defaults(Path(recipe), ())
    given = overrides.items() if isinstance(overrides, Mapping) else map(_parsed_override, overrides)
    for name, value in given:
        if not isinstance(name, str):
            raise ConfigError(f"override {name!r}: the name of a key is text (section.key), not {type(name).__name__}")
        _apply_override(raw, name, with_names(value, name))
    if not is_nemo_rl(raw):
        return raw, None
    translation = translate(raw, _source(recipe))
    return translation.recipe, translation.report(_source(recipe))


def _source(recipe: str | Path | Mapping[str, Any]) -> str:
    return "recipe" if isinstance(recipe, Mapping) else str(recipe)


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Config:
    """A plain nested dictionary as a checked Config; raises ConfigError that names every faulty key."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [explain(item) for item in error.errors()]
        raise ConfigError("\n".join([f"{source}:", *(f"  {line}" for line in lines)])) from None


def dump_recipe(config: Config) -> str:
    """The resolved recipe as YAML; loading it again gives an equal Config."""
    return dump_yaml(config.model_dump(mode="json"))


def to_show(config: Config) -> Config:
    """The recipe for the eyes of others: without the credentials that addresses in it may have."""
    mlflow = config.logger.mlflow
    clean = {
        name: without_credentials(address)
        for name in ("tracking_uri", "artifact_location")
        if (address := getattr(mlflow, name)) is not None
    }
    logger = config.logger.model_copy(update={"mlflow": mlflow.model_copy(update=clean)})
    return config.model_copy(update={"logger": logger})


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs between two resolved recipes; addresses without credentials."""
    lines = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += changed_keys(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {_as_yaml(before)} -> {_as_yaml(after)}")
    return lines


def _as_yaml(value: Any) -> str:
    """As it stands in a recipe: null, true, 0.5, a text without quotes."""
    return without_credentials(value) if isinstance(value, str) else json.dumps(value)


def _read_with_defaults(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    """The file merged over the files its `defaults:` names (relative to it)."""
    if path.resolve() in parents:
        raise ConfigError(f"{path}: defaults form a circle: {' -> '.join(map(str, [*parents, path.resolve()]))}")
    return _over_defaults(_read_yaml(path), path, parents)


def _over_defaults(raw: dict[str, Any], path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    given = raw.pop("defaults", [])
    names = given if isinstance(given, list) else [given]
    merged: dict[str, Any] = {}
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{path}: defaults = {shown(given)}: must be the name of a recipe file, or a list of them"
            )
        merged = _merge_file(merged, _read_with_defaults(path.parent / name, (*parents, path.resolve())))
    return _merge_file(merged, raw)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        inside = path / "recipe.yaml"
        hint = f"; a run is resumed by its recipe: {inside}" if inside.is_file() else ""
        raise ConfigError(f"{path}: a folder, not a recipe file{hint}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe file{_nearby_recipes(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise ConfigError(f"{path}: cannot be read as a recipe: {error}") from None
    try:
        raw = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, found {type(raw).__name__}")
    return raw


def _nearby_recipes(path: Path) -> str:
    found = sorted(str(file) for file in Path("recipes").glob("*.yaml"))
    near = difflib.get_close_matches(str(path), found, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _merge_file(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A section with `_override_: true` replaces the one beneath it, as in NeMo-RL's files; others are merged."""
    whole = {name for name, value in above.items() if isinstance(value, dict) and value.get("_override_") is True}
    kept = {name: value for name, value in below.items() if name not in whole}
    marked = {name: {k: v for k, v in above[name].items() if k != "_override_"} for name in whole}
    return _merge(kept, {**above, **marked})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if value == "???" and old is not None:  # OmegaConf's "to be given", which it is by the file beneath
            continue
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parsed_override(override: str) -> tuple[str, Any]:
    if not isinstance(override, str):
        raise ConfigError(f"override {override!r}: write it as text, 'section.key=value'")
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        return name, parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {shown(override)}: {error}") from None


def _apply_override(raw: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    here = raw
    for section in sections:
        inner = here.get(section)
        here[section] = dict(inner) if isinstance(inner, dict) else {}
        here = here[section]
    here[last] = value
