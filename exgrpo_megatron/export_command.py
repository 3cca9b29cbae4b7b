"""`exgrpo export`: a run's checkpoint as a Hugging Face folder, without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from exgrpo_conversion.config_file import CONFIG_FILE
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_megatron.checkpointing import STATE_FILE, read_state
from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ClusterConfig, Config, PolicyConfig
from exgrpo_megatron.data.embedded_model import is_embedded
from exgrpo_megatron.errors import CheckpointError, ConfigError
from exgrpo_megatron.export_request import ExportCheck, ExportDtype, ExportRequest
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.process import command, process_group, quiet_libraries, quiet_transformers
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.report.model_card import TrainedModel, model_card
from exgrpo_megatron.run_folder import EXPORT_FOLDER, METRICS_FILE, RECIPE_FILE, checkpoint_store
from exgrpo_megatron.stop import ended_by_sigterm


def export_run(request: ExportRequest) -> None:
    """Export what is asked for and say where it is.

    Raises:
        ConfigError, CheckpointError: there is no such run, checkpoint or base model, the destination cannot be used,
            or what was written is not the checkpoint's model.
    """
    _alone_on_the_cpu()
    found = _find(request)
    with ended_by_sigterm():
        folder = _export(request, found)
    recipe = request.run / RECIPE_FILE
    Console().print(
        f"next: {command('eval', recipe, '--checkpoint', folder)}", markup=False, highlight=False, soft_wrap=True
    )


@dataclass(frozen=True)
class _Found:
    """What is exported."""

    checkpoint: Path
    config: Config
    """As the checkpoint was saved, but for where the run's folder is now."""
    state: Mapping[str, Any]
    model_dir: Path
    out: Path


def _alone_on_the_cpu() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"exgrpo export is one process, and {os.environ['WORLD_SIZE']} were launched: run it alone")
    # Read when CUDA is first asked for. A run that goes on keeps its GPUs' memory, and float32 is float32 here, while
    # Transformer Engine would multiply it as TF32.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _find(request: ExportRequest) -> _Found:
    if (request.run / STATE_FILE).is_file():
        run, step = request.run.absolute().parents[1], read_state(request.run)["step"]
        raise ConfigError(
            f"{request.run} is a checkpoint of a run: name the run and the step, "
            f"{command('export', os.path.relpath(run), '--step', str(step))}"
        )
    if not (request.run / RECIPE_FILE).is_file():
        raise ConfigError(
            f"{request.run}: no folder of a run (it has no {RECIPE_FILE}); give a recipe's logger.log_dir, and --step "
            "for one of its checkpoints"
        )
    config = _in_folder(load_recipe(request.run / RECIPE_FILE), request.run)
    checkpoint = _checkpoint(config, request)
    own = checkpoint / RECIPE_FILE
    config = _in_folder(load_recipe(own), request.run) if own.is_file() else config
    dtype = "" if request.dtype is None else f"-{request.dtype}"
    out = request.out or request.run / f"{EXPORT_FOLDER}-{checkpoint.name}{dtype}"
    if out.resolve() == (request.run / EXPORT_FOLDER).resolve():
        raise ConfigError(f"--out {out}: that is where the run itself puts its model when it ends; choose another")
    model_dir = _model_dir(config, request)
    # The base model is refused later, whatever is asked for; the default place holds this very export or nothing.
    its_own = request.out is None or model_dir.resolve() == out.resolve()
    if not its_own and not request.overwrite and (out / CONFIG_FILE).exists():
        raise ConfigError(f"--out {out}: a model is there already; choose another folder, or replace it (--overwrite)")
    return _Found(checkpoint, config, read_state(checkpoint), model_dir, out)


def _in_folder(config: Config, run: Path) -> Config:
    """The recipe of a run that may have been moved."""
    return config.model_copy(update={"logger": config.logger.model_copy(update={"log_dir": str(run)})})


def _checkpoint(config: Config, request: ExportRequest) -> Path:
    if request.best and request.step is not None:
        raise ConfigError(f"--best and --step {request.step}: one of the two chooses the checkpoint")
    store = checkpoint_store(config, SingleProcess())
    newest_or_best = store.best if request.best else store.latest
    found = newest_or_best() if request.step is None else store.at(request.step)
    if found is None:
        what = "checkpoint" if request.step is None else f"checkpoint of step {request.step}"
        if request.best:
            what = f"checkpoint with {config.checkpointing.metric_name}"
        there = ", ".join(path.name for path in store.whole()) or "none"
        raise CheckpointError(f"no {what} in {store.folder}; there are: {there}")
    store.verify(found)
    return found


def _model_dir(config: Config, request: ExportRequest) -> Path:
    """Where config.json and tokenizer come from."""
    name = config.policy.model_name
    folder = request.model or (request.run / "model" if is_embedded(name) else Path(name))
    if not folder.is_dir():
        raise ConfigError(f"policy.model_name = {name!r}: no folder {folder}; say where the base model is with --model")
    return folder


def _export(request: ExportRequest, found: _Found) -> Path:
    with _process(request, found):
        import torch  # noqa: PLC0415

        from exgrpo_conversion.architecture import UnsupportedModelError  # noqa: PLC0415
        from exgrpo_conversion.formats import open_source  # noqa: PLC0415
        from exgrpo_megatron.policy.export import ExportOptions, ExportReport, export_checkpoint  # noqa: PLC0415

        def card(report: ExportReport) -> str:
            return model_card(_facts(request, found), report.describe())

        wanted = {ExportDtype.bf16: torch.bfloat16, ExportDtype.fp32: torch.float32, None: None}[request.dtype]
        tokenizer = found.config.policy.tokenizer.name
        try:
            with open_source(found.checkpoint, config=found.model_dir) as source:
                stored = {info.dtype for info in source.infos().values()}
                options = ExportOptions(
                    tokenizer_dir=Path(tokenizer) if tokenizer else None,
                    card=card,
                    dtype=None if stored == {wanted} else wanted,
                )
                policy_dir = found.checkpoint / "policy" if request.verify == ExportCheck.logits else None
                report = export_checkpoint(source, found.out, options, policy_dir)
        except (ModelFolderError, UnsupportedModelError, OSError) as error:
            raise CheckpointError(f"cannot export {found.checkpoint}: {error}") from error
    Console().print(
        f"{found.checkpoint} exported to {found.out} and checked: {report.describe()}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return found.out


@contextmanager
def _process(request: ExportRequest, found: _Found) -> Iterator[None]:
    """With logits, the group of one in which Megatron-Core runs a model whole; without, nothing of it."""
    if request.verify == ExportCheck.tensors:
        quiet_libraries()
        quiet_transformers()
        yield
        return
    whole = PolicyConfig(model_name=found.config.policy.model_name)
    alone = found.config.model_copy(update={"policy": whole, "cluster": ClusterConfig()})
    with process_group(alone, watch=False):
        yield


def _facts(request: ExportRequest, found: _Found) -> TrainedModel:
    metrics = request.run / METRICS_FILE
    return TrainedModel(
        config=found.config,
        step=found.state["step"],
        data=found.state.get("data", {}),  # absent in checkpoints of earlier versions
        fingerprint=found.state["data_fingerprint"],
        records=read_metrics(metrics) if metrics.is_file() else (),
        evaluations=_evaluations(request.run / "eval" / f"{found.checkpoint.name}.json"),
    )


def _evaluations(path: Path) -> dict[str, dict[str, float]]:
    """What `exgrpo eval` measured of the checkpoint."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {path.name: dict(content["metrics"])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no evaluation of this program ({error}): move it away") from None
