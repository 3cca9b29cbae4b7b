"""What stands beside the weights of a Megatron checkpoint: settings of the model, and folders with its config.json."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from exgrpo_conversion._common_file import read_common
from exgrpo_conversion.claims import Claims
from exgrpo_conversion.config_file import CONFIG_FILE, read_json
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.run_checkpoint import run_claims
from exgrpo_conversion.torch_dist import COMMON_FILE

HF_FOLDER = "hf"
"""Where `exgrpo convert` puts config.json and tokenizer beside weights in Megatron's formats."""
BRIDGE_FILE = "run_config.yaml"
NEMO_FILES = ("model.yaml", "io.json")
_MAX_TEXT_BYTES = 2 * 2**20


def common_claims(folder: Path) -> Claims:
    """The arguments of Megatron-LM in a distributed checkpoint, or what a run of this program says of its model; none
    in those of other programs."""
    path = folder / COMMON_FILE
    if not path.exists():
        return Claims(str(path), {})
    common = read_common(path)
    if "args" not in common and "about" in common:
        return run_claims(folder)
    return Claims(str(path), getattr(common.get("args"), "__dict__", {}))


def bridge_claims(folder: Path) -> Claims:
    """The `model` section of the run_config.yaml of Megatron Bridge."""
    path = folder / BRIDGE_FILE
    content = _read_yaml(path)
    model = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(model, Mapping):
        raise ModelFolderError(f"{path} has no section model")
    return Claims(str(path), model)


def nemo_claims(context: Path) -> Claims:
    """The model's settings in the context of a NeMo 2 folder: what was given, without the defaults of its class."""
    for name in NEMO_FILES:
        path = context / name
        if path.exists():
            content = _read_yaml(path) if name.endswith(".yaml") else _leaves(read_json(path))
            settings = next(
                (found for found in _mappings(content) if {"num_layers", "hidden_size"} <= found.keys()), {}
            )
            return Claims(str(path), settings)
    return Claims(str(context), {})


def find_config(given: Path | None, candidates: list[Path], what: Path) -> Path:
    """The Hugging Face folder of a checkpoint's model: the one given, else the first candidate with a config.json.

    Raises:
        ModelFolderError: there is none.
    """
    if given is not None:
        return given
    for folder in candidates:
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise ModelFolderError(
        f"{what} does not hold the config.json and tokenizer of its model: give a Hugging Face folder that does "
        "(--config)"
    )


class _PlainLoader(yaml.SafeLoader):
    """Takes the objects of other programs for nothing: their tags ask for code to be run.

    Merged mappings (`<<`) are refused: a few lines of them can stand for billions of entries.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merged mappings (<<) are not read", key.start_mark)


def _nothing(loader: yaml.Loader, suffix: str, node: yaml.Node) -> None:
    del loader, suffix, node


_PlainLoader.add_multi_constructor("", _nothing)


def _read_yaml(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ModelFolderError(f"{path} is larger than {_MAX_TEXT_BYTES} bytes")
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _mappings(content: Any) -> Iterator[Mapping[str, Any]]:
    """Every dictionary in nested data, outer ones first."""
    waiting = deque([content])
    seen: set[int] = set()  # the same thing may stand in many places, which may stand in many places
    while waiting:
        found = waiting.popleft()
        if not isinstance(found, Mapping | list) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Mapping):
            yield found
        waiting.extend(found.values() if isinstance(found, Mapping) else found)


def _leaves(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each object in an io.json the attributes that are plain values.

    It is a graph that Fiddle wrote: objects have `items`, pairs of a path such as "Attr(name='num_layers')" and a
    value, which is a leaf or refers to another object.
    """
    objects = content.get("objects")
    if not isinstance(objects, Mapping):
        raise ModelFolderError(f"an io.json without objects: {json.dumps(content)[:80]}")
    found = []
    for thing in objects.values():
        items = thing.get("items") if isinstance(thing, Mapping) else None
        values: dict[str, Any] = {}
        for item in items if isinstance(items, list) else []:
            name, value = _leaf(item)
            if name is not None:
                values[name] = value
        found.append(values)
    return found


def _leaf(item: Any) -> tuple[str | None, Any]:
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) or not isinstance(item[1], Mapping):
        return None, None
    path, value = item
    if not path.startswith("Attr(name='") or value.get("type") != "leaf":
        return None, None
    return path.removeprefix("Attr(name='").removesuffix("')"), value.get("value")
