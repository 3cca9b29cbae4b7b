"""YAML as recipes have it, read and written."""

from __future__ import annotations

import re
from typing import Any

import yaml

from exgrpo_megatron.errors import ConfigError

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(r"[-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """YAML with the numbers people write, and no key twice.

    In YAML 1.1, which PyYAML reads, 010 is 8, 1:30 is 90, 0x10 is 16, 2024-01-01 is a date, and 1e-6 is a text. Here
    numbers are decimal, 1e-6 is one, and the others are texts, so that a key for a number refuses them.
    """

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        try:
            return int(node.value)
        except ValueError:  # Python converts only so many digits
            raise ConfigError(f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: the mapping behind it, under what stands here
                continue
            name = self.construct_object(key_node, deep=True)
            if isinstance(name, str) and name in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {name!r} stands twice in one section")
            seen.add(name if isinstance(name, str) else str(name))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{_INTEGER.pattern})\Z"), list("-+0123456789"))


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+.0123456789"))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` or another reader of YAML would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Raises ConfigError with what is wrong with the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError("not a recipe: it is nested too deeply") from None
    except (ValueError, KeyError, AttributeError) as error:  # `!!bool maybe`: PyYAML does not check explicit tags
        raise ConfigError(f"not valid YAML: a value that its tag does not admit ({error})") from None


def dump_yaml(value: Any) -> str:
    """As a recipe is written: block style, keys in their order; `parse_yaml` gives the same values again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def yaml_text(value: Any) -> str:
    """A value on one line as a recipe would have it: `true`, `null`, `[2, 3]`."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
