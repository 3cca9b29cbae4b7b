"""`load_recipe` and `train` from Python: the run of `exgrpo train`, what it returns, and what it refuses."""

import importlib
import json
import signal
import threading
from pathlib import Path

import pytest
from cli_project import rows

from exgrpo_megatron import CheckpointError, ConfigError, DataError, UserError, load_recipe, train

SOURCE = """
ROWS = {rows!r}
def rows():
    return ROWS
"""


@pytest.fixture
def finished(trained, joined_group):
    return trained


def test_it_returns_what_the_run_left(finished):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    result = train(load_recipe("recipe.yaml"))
    run = Path("run")
    assert (result.log_dir, result.checkpoint, result.export) == (run, run / "checkpoints" / "step_000002", run / "hf")
    assert (result.first_step, result.last_step, result.finished, result.rank) == (2, 2, True, 0)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last.pop("step") == 2
    assert result.metrics == pytest.approx(last, nan_ok=True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_reward_over_the_quickstart_takes_the_place_of_its_verifiers_rules():
    """As docs/python.md says: refused beside `require_literal`, taken with the section or with the key set back."""
    own, quickstart = "math:gcd", Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"math\.require_literal = True has no effect with reward_function"):
        load_recipe(quickstart, {"env.reward_function": own})
    back = load_recipe(quickstart, {"env.reward_function": own, "env.math.require_literal": False})
    whole = load_recipe(quickstart, {"env": {"reward_function": own}})
    assert [config.env.math.require_literal for config in (back, whole)] == [False, False]


def test_a_run_goes_on_with_the_same_rows_of_a_function_and_with_no_others(finished):
    Path("same.py").write_text(SOURCE.format(rows=rows(1, 4)))
    Path("other.py").write_text(SOURCE.format(rows=rows(2, 4)))
    recipe = {"data.train.path": None, "grpo.max_num_steps": 3}
    result = train(load_recipe("recipe.yaml", {**recipe, "data.train.source_function": "same.py:rows"}))
    assert (result.first_step, result.last_step) == (2, 3)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with pytest.raises(CheckpointError, match="was trained on other questions: its data fingerprint is"):
        train(load_recipe("recipe.yaml", {**recipe, "data.train.source_function": "other.py:rows"}))
    assert signal.getsignal(signal.SIGTERM) is on_sigterm


def test_commands_take_a_function_as_well(finished, exgrpo):
    Path("same.py").write_text(SOURCE.format(rows=rows(10, 2)))
    swap = ("data.validation.path=null", "data.validation.source_function=same.py:rows")
    assert "source_function: same.py:rows" in exgrpo("show", "recipe.yaml", *swap).out
    result = exgrpo("eval", "recipe.yaml", *swap)
    assert result.code == 0, result.err
    answers = map(json.loads, Path("run/eval/step_000002.answers.jsonl").read_text().splitlines())
    assert {answer["question_id"] for answer in answers} == {"q10", "q11"}
    result = exgrpo("simulate", "recipe.yaml", "data.train.path=null", "data.train.source_function=same.py:absent")
    assert "has no function 'absent'" in result.err


def test_a_call_while_the_script_is_imported_is_refused(finished, monkeypatch):
    Path("unguarded.py").write_text(
        "from exgrpo_megatron import load_recipe, train\n\ndef rows():\n    return []\n\n"
        "train(load_recipe('recipe.yaml', {'data.train': {'source_function': 'unguarded.py:rows'}}))\n"
    )
    monkeypatch.syspath_prepend(".")
    with pytest.raises(UserError, match=r"unguarded\.py, line 6: train\(\) is called while this file is being imp"):
        importlib.import_module("unguarded")
    with pytest.raises(ConfigError, match=r"cannot import unguarded\.py: UserError: .* the call under `if __name__"):
        train(load_recipe("recipe.yaml", {"data.train": {"source_function": "unguarded.py:rows"}}))


def test_another_thread_is_refused(finished):
    refused = []

    def call():
        try:
            train(load_recipe("recipe.yaml"))
        except UserError as error:
            refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert refused == ["train() must be called by the main thread, which answers SIGTERM and Ctrl-C; or run `exgrpo`"]


def test_processes_with_different_questions_are_refused(finished, joined_group):
    from exgrpo_megatron import run_inputs
    from exgrpo_megatron.comm import SingleProcess

    class Two(SingleProcess):
        """As if a second process had read another file: what is gathered is this one's fingerprint and another."""

        def all_gather(self, value):
            return [value, ["another"] if value and isinstance(value[0], str) else value]

    config = load_recipe("recipe.yaml")
    with pytest.raises(DataError, match=r"data.train: process 1 of 2 has other questions from train.jsonl than proc"):
        run_inputs.load_inputs(config, Two())
