"""Run by the launcher's Python: what becomes of every recipe as a task, in NeMo-Run's YAML, and built by fiddle."""

import json
import sys
import tempfile
from pathlib import Path

import fiddle
from nemo_run.core.serialization.yaml import YamlSerializer
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

from exgrpo_megatron import nemo
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.recipe import dump_recipe, load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[2]


def main():
    found = {str(path.relative_to(ROOT)): ways(path) for path in sorted((ROOT / "recipes").rglob("*.yaml"))}
    task = nemo.quickstart(["grpo.max_num_steps=7"])
    task.config.policy.megatron_cfg.optimizer.lr = 0.5
    resolved = nemo.resolve(task)
    odd = ['data.prompt_template="{question}\\n\\"quoted\\" ${HOME} 1e-3"', "data.system_prompt='None'", "grpo.seed=0"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        nemo.write_yaml(nemo.quickstart(odd, python="/p"), path)
        back = nemo.read_yaml(path, ["grpo.max_num_steps=9"])
    task.config.grpo.no_such_key = 1
    answer = {
        "recipes": found,
        "functions": sorted(name for name, value in vars(nemo).items() if hasattr(value, "__factory__")),
        "changed": [resolved.grpo.max_num_steps, resolved.policy.megatron_cfg.optimizer.lr],
        "refused": refused(task),
        "read back": [back.config.data.prompt_template, back.config.data.system_prompt, back.python,
                      back.config.grpo.max_num_steps, back.config.grpo.seed],
        "theirs": theirs(nemo.quickstart()),
        "loaded": sorted({"torch", "vllm", "megatron", "transformers"} & set(sys.modules)),
    }  # fmt: skip
    sys.stdout.write(json.dumps(answer))


def ways(path):
    """Whether the recipe is the same each way; None where the file is no whole recipe."""
    try:
        wanted = dump_recipe(load_recipe(path))
    except ConfigError:
        return None
    task = nemo.recipe(path)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.yaml").write_text(YamlSerializer().serialize(task))  # as NeMo-Run exports it
        back = nemo.read_yaml(Path(folder) / "task.yaml")
    shipped = ZlibJSONSerializer()  # what NeMo-Run sends to a machine
    built = fiddle.build(shipped.deserialize(shipped.serialize(task))).keywords["config"]
    recipes = [nemo.resolve(task), nemo.resolve(back), parse_recipe(built)]
    return [dump_recipe(one) == wanted for one in recipes]


def refused(task):
    try:
        nemo.resolve(task)
    except ConfigError as error:
        return str(error)
    return None


def theirs(task):
    """What NeMo-Run's own reader makes of it."""
    try:
        YamlSerializer().deserialize(YamlSerializer().serialize(task))
    except Exception as error:  # noqa: BLE001 (whatever it raises, it must raise something)
        return type(error).__name__
    return None


main()
