"""W&B and MLflow, read back with their own means, after runs of the real trainer that stop and go on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wandb_files
from logged_runs import STEPS, config_of, run_part
from other_tools import needs
from quoted_texts import quoted_texts

from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.recipe import parse_recipe

pytestmark = needs("wandb", "mlflow", "sqlalchemy")

BOTH = {
    "wandb_enabled": True,
    "wandb": {"project": "chains", "name": "small", "mode": "offline"},
    "mlflow_enabled": True,
    "mlflow": {"experiment_name": "chains", "run_name": "small"},
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory, data_parallel):
    """The folder of a run that stopped after step 3, lost that checkpoint, and went on from step 2 to its end."""
    folder = tmp_path_factory.mktemp("logged")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
        config = config_of(folder, held_out=True, **BOTH)
        run_part(config, data_parallel, monkeypatch, 3)
        first = read_metrics(folder / "run" / "metrics.jsonl")
        shutil.rmtree(folder / "run" / "checkpoints" / "step_000003")
        second = run_part(config, data_parallel, monkeypatch)
    return config, first, second


def in_force(logged):
    """By step, what the tools should hold: step 3 as it was when it was logged first."""
    config, first, _ = logged
    now = read_metrics(run_of(config) / "metrics.jsonl")
    return {int(record["step"]): record for record in [*now, *first]}


def run_of(config):
    return Path(config.logger.log_dir)


def offline_files(config):
    return sorted((run_of(config) / "wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_has_every_metric_of_every_step_once_over_a_resume(logged):
    config, _, _ = logged
    files = offline_files(config)
    assert len(files) == 2
    assert len({path.stem for path in files}) == 1, "one run, in two parts"
    lines = [line for path in files for line in wandb_files.history(path)]
    assert [line["_step"] for line in lines] == list(range(STEPS + 1))
    for line in lines:
        expected = {name: value for name, value in in_force(logged)[line["_step"]].items() if name != "step"}
        own = {name: value for name, value in line.items() if not name.startswith(("_", "answers"))}
        assert own.keys() == expected.keys()
        assert own == pytest.approx(expected)


def test_wandb_has_the_recipe_the_versions_answers_and_what_came_of_it(logged):
    config, _, _ = logged
    first, last = offline_files(config)
    kept = wandb_files.config(first)
    made_with = kept.pop("made_with")
    assert parse_recipe({name: value for name, value in kept.items() if not name.startswith("_")}) == config
    assert made_with["processes"] == "1"
    assert "torch" in made_with
    outcome = wandb_files.summary(last)
    assert outcome["last_step"] == STEPS
    records = read_metrics(run_of(config) / "metrics.jsonl")
    assert outcome["after/validation/pass_rate_t1"] == records[-1]["validation/pass_rate_t1"]
    table = next(run_of(config).glob("wandb/offline-run-*/files/media/table/answers_1_*.table.json"))
    kept = json.loads(table.read_text())
    rows = [dict(zip(kept["columns"], row, strict=True)) for row in kept["data"]]
    assert len(rows) == config.logger.num_answers
    # The last answer of each of the four groups, which the script has wrong: q3 is `3+1`, and 53 is no 4.
    by_id = {row["question_id"]: row for row in rows}
    question_id, row = next(iter(by_id.items()))
    number = int(question_id[1:])
    assert (row["question"], row["gold"], row["correct"]) == (f"{number}+1", str(number + 1), False)
    assert row["answer"] == f"\\boxed{{{number + 50}}}"
    assert (last.parent / "files" / "README.md").is_file()


def test_mlflow_has_every_metric_of_every_step_once_over_a_resume(logged):
    from mlflow import MlflowClient

    config, _, _ = logged
    client = MlflowClient(f"sqlite:///{run_of(config) / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("chains")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    expected = in_force(logged)
    names = {name for record in expected.values() for name in record if name != "step"}
    assert run.data.metrics.keys() == names
    for name in ("policy/loss", "reward/pass_rate", "time/step_s", "validation/pass_rate_greedy"):
        points = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in points] == [
            (step, pytest.approx(record[name])) for step, record in expected.items() if name in record
        ]


def test_mlflow_has_the_recipe_the_versions_answers_and_what_came_of_it(logged):
    from mlflow import MlflowClient

    config, _, _ = logged
    client = MlflowClient(f"sqlite:///{run_of(config) / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("chains").experiment_id])
    assert run.data.params["grpo.num_prompts_per_step"] == "4"
    assert run.data.params["policy.model_name"] == "embedded:chain-qwen2"
    assert run.data.tags["made_with.torch"]
    kept = run_of(config) / "mlflow_artifacts" / run.info.run_id / "artifacts"
    assert {path.name for path in kept.iterdir()} == {"answers", "recipe.yaml", "summary.json", "README.md"}
    assert json.loads((kept / "summary.json").read_text())["last_step"] == STEPS
    assert {path.name for path in (kept / "answers").iterdir()} == {"step_000001.jsonl", "step_000005.jsonl"}


def test_the_model_card_names_the_runs_and_the_end_names_what_was_logged_before(logged):
    config, _, second = logged
    card = (run_of(config) / "hf" / "README.md").read_text()
    identity = json.loads((run_of(config) / "loggers" / "mlflow.json").read_text())
    assert f"The run in MLflow: run {identity['run_id']} of sqlite:///" in card
    assert "The run in Weights & Biases: " in card
    again = [note for note in second.notes if "before the run was resumed" in note]
    assert [note.split(": steps")[0] for note in again] == ["Weights & Biases", "MLflow"]
    assert "steps 3 to 3 were logged" in again[0]


def test_the_end_names_what_sends_both_parts_of_the_run_and_the_database_that_has_it(logged):
    config, _, second = logged
    sync, look = second.outcome.tools["Weights & Biases"], second.outcome.tools["MLflow"]
    pattern = sync.partition("; to send it: wandb sync ")[2]
    assert sorted(Path("/").glob(pattern.lstrip("/"))) == [path.parent for path in offline_files(config)]
    assert look.endswith(f"mlflow ui --backend-store-uri sqlite:///{run_of(config) / 'mlflow.db'}")


def test_a_logger_that_fails_in_the_middle_ends_nothing_and_is_counted(tmp_path, data_parallel, monkeypatch, caplog):
    # From step 3 on something else stands in the file of the database.
    config = config_of(tmp_path, mlflow_enabled=True)
    from exgrpo_megatron.loggers.mlflow_logger import MlflowLogger

    write = MlflowLogger.metrics

    def break_then_write(self, step, values):
        if step == 3:
            (tmp_path / "run" / "mlflow.db").write_bytes(b"no database any more" * 1000)
        write(self, step, values)

    monkeypatch.setattr(MlflowLogger, "metrics", break_then_write)
    part = run_part(config, data_parallel, monkeypatch)
    assert part.training.trainer.last_step == STEPS
    # Steps 3, 4 and 5, and the end itself; answers and outcome are files, which the client needs no database for.
    (line,) = [note for note in part.notes if note.startswith("MLflow: ")]
    assert line == "MLflow: 4 calls failed, the first: MlflowException: (sqlite3.DatabaseError) file is not a database"
    assert caplog.text.count("training goes on") == 1
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_offline_nothing_is_looked_up_or_connected_to(tmp_path):
    # In a process of its own, so that what is sent when it ends counts too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("offline_run.py"), tmp_path],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["Weights & Biases []", "MLflow []", "connections: []"]


def test_without_an_api_key_wandb_online_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    from exgrpo_megatron.errors import ConfigError
    from exgrpo_megatron.loggers.choice import check_loggers

    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as caught:
        check_loggers(config_of(tmp_path, wandb_enabled=True).logger)
    (quoted,) = (quote for quote in quoted_texts() if quote.how == "wandb")
    assert quoted.pattern().fullmatch(str(caught.value)), "docs/troubleshooting.md quotes another message"
    check_loggers(config_of(tmp_path, wandb_enabled=True, wandb={"mode": "offline"}).logger)
