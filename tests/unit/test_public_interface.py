"""The public interface: every name is there, documented, typed and used in the script that `make check` types."""

import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "exgrpo_megatron": "exgrpo_megatron",
    "exgrpo_megatron.replay": "exgrpo_megatron/replay",
    "exgrpo_kernels": "kernels/exgrpo_kernels",
    "exgrpo_conversion": "conversion/exgrpo_conversion",
}
PLAIN = {"__version__", "Form", "Shaping"}  # a text and types of literals, which have no docstrings of their own


def public(package):
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_and_method_has_a_docstring(package):
    found = public(package)
    assert list(found) == sorted(found)
    for name, thing in found.items():
        if name in PLAIN:
            continue
        assert thing.__module__.partition(".")[0] in {"exgrpo_megatron", "exgrpo_kernels", "exgrpo_conversion"}
        text = inspect.getdoc(thing) or ""
        # A dataclass without one of its own has its signature for one.
        assert len(text.split()) >= 5, name
        assert not text.startswith(f"{thing.__name__}("), name
        own = vars(thing).items() if inspect.isclass(thing) else ()
        methods = {key: member for key, member in own if not key.startswith("_") and _is_method(member)}
        assert [f"{name}.{key}" for key, member in methods.items() if not inspect.getdoc(member)] == []


def _is_method(member):
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod | property)


@pytest.mark.parametrize("package", PACKAGES)
def test_names_resolve_lazily_and_others_do_not(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_types_are_shipped():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, folder in PACKAGES.items():
        if "." not in package:
            assert (ROOT / folder / "py.typed").is_file()
            assert "py.typed" in data[package]


def test_the_typed_script_uses_every_name():
    script = (ROOT / "tests" / "typed" / "public_interface.py").read_text()
    unused = [f"{package}.{name}" for package in PACKAGES for name in public(package) if name not in script]
    assert unused == []


def test_the_packages_by_themselves_import_nothing_heavy():
    names = "exgrpo_megatron, exgrpo_kernels, exgrpo_conversion"
    code = f"import sys, {names}; print({{'torch', 'pydantic'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": ".:kernels:conversion"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
