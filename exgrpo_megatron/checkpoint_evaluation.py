"""Evaluation of a checkpoint outside a run (`exgrpo eval`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from torch import Tensor

from exgrpo_megatron import __version__, build
from exgrpo_megatron.build import Inputs, writable_folder
from exgrpo_megatron.checkpointing import read_state
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.evaluator import Evaluation
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.rollout.weight_buckets import in_groups
from exgrpo_megatron.run_folder import checkpoint_store


def find_checkpoint(config: Config, given: Path | None, comm: Communicator) -> Path:
    """The folder to evaluate: `given`, or the newest checkpoint of the recipe's run.

    Raises:
        ConfigError: the recipe has no held-out questions.
        CheckpointError: there is no such folder, or it is neither a checkpoint nor a Hugging Face folder.
    """
    if config.data.validation is None:
        raise ConfigError("data.validation: an evaluation needs held-out questions, but it is not set")
    found = given or checkpoint_store(config, comm).latest()
    if found is None:
        raise CheckpointError(f"no checkpoint under {config.logger.log_dir}: train first, or give --checkpoint DIR")
    if not found.is_dir():
        raise CheckpointError(f"--checkpoint {found}: no such folder; give a run's checkpoint or a Hugging Face folder")
    if not _is_hf(found):
        read_state(found)
    return found


def evaluate_checkpoint(config: Config, inputs: Inputs, checkpoint: Path, comm: Communicator) -> Evaluation:
    """Held-out pass rates of a run's checkpoint or of a Hugging Face folder."""
    weights = _weights(config, inputs, checkpoint, comm)
    engine = build.build_engine(config, inputs, comm, weights)
    engine.load_weights(weights(), version=0)
    with closing(build.build_verifier(config)) as verifier:
        evaluator = build.build_evaluator(config, inputs, engine, verifier, comm)
        assert evaluator is not None, "find_checkpoint refuses a recipe without data.validation"
        evaluation = evaluator.run()
    engine.close()
    return evaluation


def write_evaluation(config: Config, evaluation: Evaluation, checkpoint: Path) -> tuple[Path, Path]:
    """Metrics as `<log_dir>/eval/<checkpoint>.json`, and every graded answer beside it as JSONL; both paths."""
    folder = writable_folder(Path(config.logger.log_dir) / "eval", "logger.log_dir")
    name = _name(checkpoint.resolve(), Path(config.logger.log_dir).resolve())
    summary, answers = folder / f"{name}.json", folder / f"{name}.answers.jsonl"
    content = {
        "checkpoint": str(checkpoint),
        "version": __version__,
        "eval": config.eval.model_dump(mode="json"),
        "metrics": evaluation.metrics,
    }
    replace_text(answers, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.answers))
    replace_text(summary, json.dumps(content, indent=1) + "\n")
    return summary, answers


def _weights(
    config: Config, inputs: Inputs, checkpoint: Path, comm: Communicator
) -> Callable[[], Iterable[tuple[str, Tensor]]]:
    """What gives the checkpoint's weights, as often as it is called."""
    if _is_hf(checkpoint):
        build.check_architecture(checkpoint, inputs)
        reader = build.HFReader(checkpoint)
        return lambda: ((name, reader.get(name)) for name in in_groups(reader.names()))
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    checkpoint_store(config, comm).verify(checkpoint)
    actor.load(checkpoint / "policy")
    return actor.export_weights


def _is_hf(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _name(checkpoint: Path, log_dir: Path) -> str:
    """`step_000020` or `hf` of this run; of another one with its folder before it, so that neither hides the other."""
    own = checkpoint.is_relative_to(log_dir)
    return checkpoint.name if own else f"{checkpoint.parent.name}-{checkpoint.name}"
