"""A run in MLflow. The only module that imports mlflow."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

# A run tells nobody how it uses MLflow, least of all one that keeps its metrics in a file; read when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# At a run's end MLflow prints its address as it is, with user and password.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from exgrpo_megatron.addresses import without_credentials
from exgrpo_megatron.config import MLflowConfig
from exgrpo_megatron.loggers.mlflow_names import mlflow_name
from exgrpo_megatron.loggers.mlflow_store import opening, own_uri
from exgrpo_megatron.loggers.protocol import Ended, RunFacts
from exgrpo_megatron.metric_sinks import AnswerRow

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every table that it makes
_STATUS = {Ended.finished: "FINISHED", Ended.stopped: "KILLED", Ended.failed: "FAILED"}
_METRICS_A_CALL, _PARAMS_A_CALL, _PARAM_LENGTH = 1000, 100, 6000
"""What MLflow takes at most."""

T = TypeVar("T")


class MlflowLogger:
    """One run of MLflow."""

    def __init__(self, facts: RunFacts, run_id: str | None) -> None:
        """Begin a run, or go on with that of `run_id`; raises where MLflow cannot: LoggerError, or
        anything of MLflow, of a database's driver, of the network."""
        chosen = facts.logger.mlflow
        uri = _tracking_uri(chosen, facts.folder)
        with opening(uri):
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self.run_id = self._found(run_id) or self._begun(facts, uri)
            self._describe(facts, new=self.run_id != run_id)
        shown = without_credentials(uri)
        self.where = f"run {self.run_id} of {shown}"
        command = f"; to look at it (pip install mlflow): mlflow ui --backend-store-uri {shown}"
        self.look = self.where + ("" if uri.startswith(("http:", "https:", "databricks")) else command)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(mlflow_name(name), float(value), now, step) for name, value in values.items()]
        for some in _portions(metrics, _METRICS_A_CALL):
            self._client.log_batch(self.run_id, metrics=some)

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        lines = [json.dumps(asdict(row), ensure_ascii=False) for row in rows]
        self._client.log_text(self.run_id, "\n".join(lines) + "\n", f"answers/step_{step:06d}.jsonl")

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        self._client.log_dict(self.run_id, dict(summary), "summary.json")
        for path in files:
            self._client.log_artifact(self.run_id, str(path))

    def close(self, ended: Ended) -> None:
        self._client.set_terminated(self.run_id, _STATUS[ended])

    def _found(self, run_id: str | None) -> str | None:
        if run_id is None:
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begun(self, facts: RunFacts, uri: str) -> str:
        chosen = facts.logger.mlflow
        # Beside a database in the run's folder; a server has a place of its own.
        beside = (facts.folder / "mlflow_artifacts").absolute().as_uri() if uri == own_uri(facts.folder) else None
        experiment = self._experiment(chosen.experiment_name, chosen.artifact_location or beside)
        name = (chosen.run_name or facts.name) + facts.suffix
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def _experiment(self, name: str, files: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_location=files))
        except MlflowException as error:
            # Another run that began at the same time, or this request itself, sent again after its answer was lost.
            found = self._client.get_experiment_by_name(name) if error.error_code == "RESOURCE_ALREADY_EXISTS" else None
            if not found:
                raise
            return str(found.experiment_id)

    def _describe(self, facts: RunFacts, *, new: bool) -> None:
        """Recipe, versions and files. Parameters of MLflow never change: a resumed run adds those that are new, and
        recipe.yaml is the one in force."""
        params = dict(_flat(facts.recipe, ""))
        known = {} if new else self._client.get_run(self.run_id).data.params
        fresh = [Param(name, text[:_PARAM_LENGTH]) for name, text in params.items() if name not in known]
        tags = [RunTag(f"made_with.{name}", value) for name, value in facts.made_with.items()]
        for some in _portions(fresh, _PARAMS_A_CALL):
            self._client.log_batch(self.run_id, params=some)
        self._client.log_batch(self.run_id, tags=tags)
        for path in facts.files:
            self._client.log_artifact(self.run_id, str(path))


def _tracking_uri(config: MLflowConfig, folder: Path) -> str:
    if config.tracking_uri is not None:
        return config.tracking_uri
    return str(mlflow.get_tracking_uri()) if mlflow.is_tracking_uri_set() else own_uri(folder)


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys with their values as JSON, text as it is."""
    for name, value in section.items():
        key = mlflow_name(f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)


def _portions(items: Sequence[T], size: int) -> Iterator[list[T]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))
