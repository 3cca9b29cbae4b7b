"""What is written while training: files of the run, and its record in tools of others."""

from __future__ import annotations

from typing import Literal

from exgrpo_megatron.config.section import Count, Name, Section, key


class WandbConfig(Section):
    """The run in Weights & Biases; its address and API key are wandb's own settings."""

    project: Name = key("exgrpo", "project")
    name: Name | None = key(None, "name of the run; null: that of logger.log_dir")
    entity: Name | None = key(None, "user or team; null: that of the API key")
    mode: Literal["online", "offline"] | None = key(
        None, "offline: into logger.log_dir, for `wandb sync`, and nothing is sent; null: WANDB_MODE, else online"
    )


class MLflowConfig(Section):
    """The run in MLflow."""

    experiment_name: Name = key("exgrpo", "experiment")
    run_name: Name | None = key(None, "name of the run; null: that of logger.log_dir")
    tracking_uri: Name | None = key(
        None, "server or database; null: MLFLOW_TRACKING_URI, else <logger.log_dir>/mlflow.db (SQLite)"
    )
    artifact_location: Name | None = key(
        None,
        "where a new experiment keeps files; null: MLflow's choice, beside mlflow.db <logger.log_dir>/mlflow_artifacts",
    )


class LoggerConfig(Section):
    """What is written while training."""

    log_dir: Name = key("runs/default", "folder of the run", "path")
    tensorboard_enabled: bool = key(True, "write TensorBoard events beside metrics.jsonl")
    wandb_enabled: bool = key(False, "also keep the run in Weights & Biases (extra `wandb`, docs/loggers.md)")
    wandb: WandbConfig = key(WandbConfig(), "where in Weights & Biases")
    mlflow_enabled: bool = key(False, "also keep the run in MLflow (extra `mlflow`, docs/loggers.md)")
    mlflow: MLflowConfig = key(MLflowConfig(), "where in MLflow")
    num_answers: Count = key(
        4,
        "answers whose texts these two get, of the first step, of those with an evaluation and of the last",
        "answers",
    )
    experience_history: bool = key(
        True, "write what happened to each question, step by step, to experience_history.jsonl (`exgrpo experience`)"
    )
