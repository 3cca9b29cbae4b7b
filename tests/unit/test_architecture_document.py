"""docs/architecture.md names things that exist."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_it_names_is_there():
    named = re.findall(r"`((?:exgrpo_megatron|kernels|conversion|tests)/[\w./]+)`", TEXT)
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_package_has_a_row():
    packages = [path.parent.name for path in (ROOT / "exgrpo_megatron").glob("*/__init__.py")]
    assert [name for name in packages if f"`exgrpo_megatron/{name}/`" not in TEXT] == []


def test_every_name_in_a_module_is_there():
    named = [*re.findall(r"`([a-z_.]+)\.([A-Z]\w+)`", TEXT), *re.findall(r"`([a-z]+\.[a-z_]+)\.([a-z_]+)`", TEXT)]
    assert len(named) > 12
    for module, name in named:
        package = "" if module.startswith("exgrpo_conversion") else "exgrpo_megatron."
        assert hasattr(importlib.import_module(package + module), name), f"{module}.{name}"


def test_every_module_beside_the_packages_is_named():
    modules = [path.name for path in (ROOT / "exgrpo_megatron").glob("*.py") if not path.name.startswith("__")]
    assert [name for name in modules if name not in TEXT] == []
