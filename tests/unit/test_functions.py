"""Functions that a script hands over become names by which other processes find them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exgrpo_megatron.data.chain_arithmetic import partial_credit
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.functions import function_name, with_names
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.rewards.function_worker import load_function

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import functools, json, sys
from beside import of_a_module
from pack import of_a_package
from pack.inner import of_its_module
from exgrpo_megatron import ConfigError, load_recipe
from exgrpo_megatron.functions import function_name

def of_the_script():
    yield {"question": "1+1", "answer": 2}

def maker():
    def inner():
        return []
    return inner

@functools.lru_cache
def cached():
    return []

def replaced(): ...
first = replaced
def replaced(): ...

class Task:
    def rows(self): ...

found = {}
for name, value in {
    "script": of_the_script, "module": of_a_module, "lambda": lambda: [], "closure": maker(), "cached": cached,
    "partial": functools.partial(of_the_script), "replaced": first, "method": Task().rows, "unbound": Task.rows,
}.items():
    try:
        found[name] = function_name(value, "data.train.source_function")
    except ConfigError as error:
        found[name] = str(error).partition(";")[0].rpartition(": ")[2]
small = load_recipe(
    {"data": {"train": {"source_function": of_the_script}}, "policy": {"model_name": "embedded:chain-qwen2"}},
    {"env.reward_function": of_a_module, "grpo.seed": 5},
)
found["recipe"] = [small.data.train.source_function, small.env.reward_function, small.grpo.seed]
found["package"] = [function_name(one, "env.reward_function") for one in (of_a_package, of_its_module)]
found["torch"] = "torch" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a script in a folder of its own is told, started from the folder above."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "scripts").mkdir()
    (folder / "scripts" / "beside.py").write_text("def of_a_module(): ...\n")
    (folder / "scripts" / "pack").mkdir()
    (folder / "scripts" / "pack" / "__init__.py").write_text(
        "from .inner import SEVEN\ndef of_a_package(): return SEVEN\n"
    )
    (folder / "scripts" / "pack" / "inner.py").write_text("SEVEN = 7\ndef of_its_module(): return SEVEN\n")
    (folder / "scripts" / "own.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "scripts/own.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "folder": folder}


def test_functions_of_a_script_and_of_a_module_beside_it_are_named_by_their_file(found):
    assert (found["script"], found["module"]) == ("scripts/own.py:of_the_script", "scripts/beside.py:of_a_module")
    assert found["recipe"] == ["scripts/own.py:of_the_script", "scripts/beside.py:of_a_module", 5]


def test_functions_of_a_package_beside_the_script_are_found_from_another_folder(found, monkeypatch):
    assert found["package"] == ["scripts/pack/__init__.py:of_a_package", "scripts/pack/inner.py:of_its_module"]
    monkeypatch.chdir(found["folder"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert [load_function(name)() for name in found["package"]] == [7, 7]


@pytest.mark.parametrize(
    ("script", "reason"),
    [("-", "was typed in, and no file has it"), ("noext", "noext, whose name must end in .py")],
)
def test_a_script_that_no_other_process_can_import_is_told_so(tmp_path, script, reason):
    code = (
        "from exgrpo_megatron.functions import function_name\n"
        "def own(): ...\n"
        "function_name(own, 'env.reward_function')\n"
    )
    (tmp_path / "noext").write_text(code)
    done = subprocess.run(
        [sys.executable, script], input=code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"), [({1: 2}, r"override 1: the name of a key is text"), ([3], "override 3: write")]
)
def test_an_override_that_is_no_text_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe({}, overrides)


def test_what_no_other_process_could_import_is_refused_with_the_reason(found):
    assert found["lambda"] == "is <lambda>, not at the top level of its module"
    assert found["closure"] == "is maker.<locals>.inner, not at the top level of its module"
    assert found["cached"] == "is a _lru_cache_wrapper, not a function that `def` makes"
    assert found["partial"] == "is a partial, not a function that `def` makes"
    assert found["replaced"] == "is not what __main__.replaced is (a decorator may have replaced it)"
    assert found["method"] == "is a method, not a function that `def` makes"
    assert found["unbound"] == "is Task.rows, not at the top level of its module"


def test_a_recipe_is_resolved_without_torch(found):
    assert found["torch"] is False


def test_a_function_of_an_installed_module_is_named_by_it():
    name = "exgrpo_megatron.data.chain_arithmetic:partial_credit"
    assert function_name(partial_credit, "env.reward_function") == name
    assert with_names({"env": {"reward_function": partial_credit}, "paths": [Path("a/b"), 3]}, "") == {
        "env": {"reward_function": name},
        "paths": ["a/b", 3],
    }
    with pytest.raises(ConfigError, match=r"env\.reward_function = <class 'int'>: is a type"):
        with_names({"env": {"reward_function": int}}, "")
