"""docs/migrating.md names keys and values that recipes take; its worked examples make the batches of their sources."""

import copy
import re
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from exgrpo_megatron.cli import main
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.metrics import find_metric
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.recipe_options import options
from exgrpo_megatron.recipe_table import derived_table

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
QUICKSTART = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
KEYS = {option.name for option in options()}
VERL_RECIPE, RELEASED_RECIPE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SECTIONS = re.compile(r"(?:grpo|loss_fn|experience|demonstrations|data|policy|env|eval|checkpointing|logger|cluster)")


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, without those of the tables' heads."""
    body = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {number for number, row in enumerate(cells[1:]) if set(row) == {"---"}}
    return [row for number, row in enumerate(cells) if number not in heads and set(row) != {"---"}]


TABLES = ("From verl", "From the released ExGRPO code", "From TRL", "From slime")
KEY_ROWS = [(heading, row) for heading in TABLES for row in rows(heading) if len(row) == 3]
METRIC_ROWS = [row for row in rows("From verl") if len(row) == 2]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_are_there():
    assert len(KEY_ROWS) > 150
    assert len(METRIC_ROWS) > 10


@pytest.mark.parametrize("row", [row for _, row in KEY_ROWS], ids=lambda row: row[0])
def test_a_row_names_a_key_that_recipes_take_or_says_why_there_is_none(row):
    _, here, note = row
    names = [entry.partition(":")[0] for entry in quoted(here)]
    if not names:
        assert here == "-"
        assert note
    assert [name for name in names if name not in KEYS and not any(key.startswith(f"{name}.") for key in KEYS)] == []
    given = {name: yaml.safe_load(value) for name, value in (e.split(": ") for e in quoted(here) if ": " in e)}
    config = parse_recipe(recipe_with({**needed(given), **given}))
    assert {name: reduce(getattr, name.split("."), config) for name in given} == given


def needed(given: dict[str, Any]) -> dict[str, Any]:
    """What the quickstart has otherwise, and the values of a row do not go with."""
    keys = {
        "policy.sequence_packing.enabled": {"policy.train_micro_batch_size": None, "policy.logprob_batch_size": None},
        "loss_fn.use_importance_sampling_correction": {"loss_fn.old_logprobs": "recomputed"},
        "policy.train_global_batch_size": {"grpo.num_prompts_per_step": 128},
    }
    return {key: value for name in given for key, value in keys.get(name, {}).items()}


def recipe_with(given: dict[str, Any]) -> dict[str, Any]:
    """The quickstart's recipe with other values, by dotted key."""
    raw = copy.deepcopy(QUICKSTART)
    for name, value in given.items():
        *sections, last = name.split(".")
        reduce(lambda here, section: here.setdefault(section, {}), sections, raw)[last] = value
    return raw


def test_keys_and_metrics_named_in_the_remarks_are_there_too():
    notes = [name for _, row in KEY_ROWS for name in quoted(row[2])]
    dotted = [name.partition(":")[0] for name in notes if re.match(rf"{SECTIONS.pattern}\.\w", name)]
    assert [name for name in dotted if name not in KEYS and not name.startswith("data.train_")] == []
    metrics = [name for row in METRIC_ROWS for name in quoted(row[1])]
    assert len(metrics) > 12
    assert [name for name in metrics if find_metric(name) is None] == []


def test_a_key_of_verl_in_a_recipe_is_answered_with_where_to_look():
    theirs = [name for heading, row in KEY_ROWS if heading in TABLES[:2] for name in quoted(row[0]) if "." in name]
    assert len(theirs) > 90
    with pytest.raises(ConfigError) as caught:
        parse_recipe(recipe_with(dict.fromkeys(theirs, 1)))
    told = {line.split(":")[0].strip() for line in str(caught.value).splitlines() if "docs/migrating.md" in line}
    sections = {name.split(".")[0] for name in theirs}
    assert told == {name for name in theirs if name.startswith("data.") and name.count(".") == 1} | {
        "data.custom_cls"
    } | (sections - {"data"})


def test_the_script_of_verl_has_the_same_batches_as_a_recipe():
    """Of run_qwen2-7b_math_megatron.sh: 1024 questions a step, 5 answers, mini-batches of 256 questions, 15 epochs of
    7473 + 7500 questions, of whose last batch the rest is dropped; 8 GPUs, TP2 x PP2."""
    config = parse_recipe(yaml.safe_load(VERL_RECIPE))
    table = dict(derived_table(config, data_parallel_size=8 // (2 * 2)))
    assert table["sequences trained a step"] == str(1024 * 5)
    assert table["sequences an optimiser step"] == str(256 * 5)
    assert table["optimiser steps a step"] == str(1024 // 256)
    assert config.grpo.max_num_steps == (7473 + 7500) // 1024 * 15
    assert not config.experience.enabled


def test_the_released_script_has_the_same_batches_as_a_recipe():
    """Of run_exgrpo.sh: 128 questions a step, 8 answers, mini-batches of 64 questions, 700 steps, half replayed."""
    config = parse_recipe(yaml.safe_load(RELEASED_RECIPE))
    table = dict(derived_table(config, data_parallel_size=8))
    assert table["questions a step"] == "128, of which at most 64 replayed"
    assert table["sequences trained a step"] == str(128 * 8)
    assert table["sequences an optimiser step"] == str(64 * 8)
    assert table["optimiser steps in all"] == str(700 * 2)
    assert config.policy.megatron_cfg.model_parallel_size == 1


@pytest.mark.parametrize("text", [VERL_RECIPE, RELEASED_RECIPE], ids=["verl", "released"])
def test_exgrpo_show_says_that_the_recipe_fits_into_8_gpus_of_80_gb(text, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["show", str(tmp_path / "recipe.yaml"), "--gpu-memory-gib", "80"])
    assert ended.value.code == 0
    assert "Memory of a GPU in GiB, of 80" in capsys.readouterr().out


def test_the_norms_of_the_released_code_are_what_the_page_says():
    """512 answers on 8 ranks: a sum over 64 answers a rank, averaged over ranks, is 64 times the mean over all."""
    assert "are therefore 1/64 and 7.8 in units of `global_width`" in " ".join(PAGE.split())
    assert (512 / 8, round(1 / 64, 4), round(500 / 64, 1)) == (64, 0.0156, 7.8)


def test_a_function_of_verl_can_be_wrapped_as_the_page_says(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(solution_str.endswith(ground_truth)), "asked": extra_info["question"]}

    monkeypatch.setitem(sys.modules, "my_project", ModuleType("my_project"))
    monkeypatch.setitem(sys.modules, "my_project.scores", ModuleType("my_project.scores"))
    sys.modules["my_project.scores"].compute_score = compute_score
    made: dict[str, Any] = {}
    exec(code, made)
    assert made["reward"](question="1+1", response="it is 2", answer="2") == 1.0
    assert made["reward"](question="1+1", response="it is 3", answer="2") == 0.0
