"""Save and resume through Megatron's distributed checkpoints (format `torch_dist`)."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from exgrpo_conversion.architecture import Architecture
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.policy import optimizer_state, sharded_files
from exgrpo_megatron.policy.sharded_files import ShardedFiles

logger = logging.getLogger(__name__)

FORMAT = 1
"""Number of this layout of `Checkpointed`; a checkpoint of another one is refused."""


@dataclass(frozen=True)
class Checkpointed:
    """What a checkpoint holds beside the random generators of every rank."""

    architecture: Architecture
    precision: str
    version: int
    chunks: Sequence[GPTModel]
    """The parts of the model on this pipeline stage."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


class PolicySave:
    """A save on its way: made by `begin_save`, written by `write`, a checkpoint after `finish`."""

    def __init__(self, files: ShardedFiles) -> None:
        self._files = files

    def write(self) -> list[Path]:
        """Write this rank's share and return its files; not collective, and allowed in any thread.

        Raises:
            CheckpointError: it cannot be written.
        """
        with _as_checkpoint_error(self._what, _ROOM):
            return self._files.write()

    def finish(self) -> None:
        """Make it a checkpoint, once every rank's `write` has returned; collective over all ranks.

        Raises:
            CheckpointError: on every rank, where it cannot be written.
        """
        with _rank_0_decides(), _as_checkpoint_error(self._what, _ROOM):
            self._files.finish()

    @property
    def _what(self) -> str:
        return f"cannot write the checkpoint {self._files.folder}"


_ROOM = "check free space and permissions"


def begin_save(folder: Path, state: Checkpointed, *, snapshot: bool) -> PolicySave:
    """A save of `state` into `folder`, which must be empty or absent; collective over all ranks.

    `snapshot`: copy it to host memory, so that training may go on before it is written.

    Raises:
        CheckpointError: the folder holds something, or cannot be made.
    """
    _make_empty(folder)
    tensors = {"about": _about(state), **_sharded(state, is_loading=False)}
    return PolicySave(sharded_files.plan(folder, tensors, snapshot=snapshot))


def load(folder: Path, state: Checkpointed) -> int:
    """Restore everything in `state` from `folder` and return the saved version; collective over all ranks.

    Options of the optimizer (learning rate, decay, betas) stay as they are: the recipe's, not the checkpoint's. A
    checkpoint of another layout or number of ranks leaves the random generators alone, with a warning.

    Raises:
        CheckpointError: no complete checkpoint, or one of another architecture, precision or format.
    """
    with reading(folder):
        about = dist_checkpointing.load_common_state_dict(str(folder)).get("about", {})
        _refuse_other(folder, about, state)
        wanted = _sharded(state, is_loading=True, trained=about["version"] > 0)
        if _layout(about) != _layout(_about(state)):
            wanted.pop("rng")
        loaded = dist_checkpointing.load(wanted, str(folder))
    for number, chunk in enumerate(state.chunks):
        load_weights(chunk, loaded[f"model{number}"])
    if "optimizer" in loaded:
        steps = about.get("optimizer_steps", about["version"])
        optimizer_state.restore(state.optimizer, _parameters(state), loaded["optimizer"], steps)
    else:  # saved before the first step
        optimizer_state.forget(state.optimizer)
    state.scheduler.num_steps = about["scheduler_steps"]
    state.scheduler.step(0)
    if "rng" in loaded:
        _set_rng_state(loaded["rng"])
    else:
        logger.warning(
            "%s was saved on %s and is read on %s: the random generators of torch, numpy and python start anew",
            folder, _layout(about), _layout(_about(state)),
        )  # fmt: skip
    return about["version"]


def load_model(folder: Path, state: Checkpointed) -> None:
    """The weights alone, for a new run; the optimizer's state is that of a new one. Collective over all ranks.

    Raises:
        CheckpointError: as `load`.
    """
    with reading(folder):
        about = dist_checkpointing.load_common_state_dict(str(folder)).get("about", {})
        _refuse_other(folder, about, state)
        wanted = {f"model{number}": sharded_weights(chunk) for number, chunk in enumerate(state.chunks)}
        loaded = dist_checkpointing.load(wanted, str(folder))
    for number, chunk in enumerate(state.chunks):
        load_weights(chunk, loaded[f"model{number}"])
    optimizer_state.forget(state.optimizer)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around reading a checkpoint; raises CheckpointError where it is incomplete or damaged."""
    broken = f"cannot read the checkpoint {folder}"
    for name in (sharded_files.METADATA_FILE, sharded_files.FORMAT_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"{broken}: it has no {name}; a save was interrupted: resume from another one")
    with _as_checkpoint_error(broken, "it is incomplete or damaged: resume from another one"):
        yield


def sharded_weights(chunk: GPTModel) -> dict[str, Any]:
    """Megatron's sharded tensors of a chunk, by name; what they are loaded into is the chunk's own memory."""
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    sharded = chunk.sharded_state_dict(metadata=metadata)
    return {name: tensor for name, tensor in sharded.items() if not name.endswith(_EXTRA_STATE)}


def load_weights(chunk: GPTModel, loaded: dict[str, Any]) -> None:
    """Give a chunk the tensors for which `sharded_weights` was loaded."""
    chunk.load_state_dict({name: None for name in chunk.state_dict() if name.endswith(_EXTRA_STATE)} | loaded)


_EXTRA_STATE = "_extra_state"
"""What modules of Transformer Engine, and Megatron's in their place, keep beside weights: scales of past passes, which
no FP8 recipe here has. Which modules have one depends on whose they are: it is left out."""


def _about(state: Checkpointed) -> dict[str, Any]:
    """The part that is the same on every rank."""
    return {
        "format": FORMAT,
        "architecture": asdict(state.architecture),
        "precision": state.precision,
        "version": state.version,
        "scheduler_steps": state.scheduler.num_steps,
        "optimizer_steps": optimizer_state.steps_taken(state.optimizer),
        "world_size": dist.get_world_size(),
        "tensor_parallel": mpu.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": mpu.get_pipeline_model_parallel_world_size(),
        "chunks": len(state.chunks),
        "context_parallel": mpu.get_context_parallel_world_size(),
    }


def _layout(about: dict[str, Any]) -> str:
    """How the processes that wrote a checkpoint shared the model."""
    return (
        f"{about['world_size']} processes (tensor parallel {about.get('tensor_parallel', 1)}, "
        f"pipeline {about.get('pipeline_parallel', 1)}, chunks {about.get('chunks', 1)}, "
        f"context {about.get('context_parallel', 1)})"
    )


def _parameters(state: Checkpointed) -> dict[str, torch.nn.Parameter]:
    """By their name in Megatron's state of the chunk, behind the chunk's own."""
    return {
        f"model{number}.{name}": parameter
        for number, chunk in enumerate(state.chunks)
        for name, parameter in chunk.named_parameters()
    }


def _sharded(state: Checkpointed, *, is_loading: bool, trained: bool | None = None) -> dict[str, Any]:
    """Megatron's sharded state: model, optimizer (if it was ever stepped), and this rank's generators."""
    sharded: dict[str, Any] = {f"model{number}": sharded_weights(chunk) for number, chunk in enumerate(state.chunks)}
    model = {f"{chunk}.{name}": tensor for chunk, tensors in sharded.items() for name, tensor in tensors.items()}
    if state.version > 0 if trained is None else trained:
        parameters = _parameters(state)
        sharded["optimizer"] = (
            optimizer_state.to_load(state.optimizer, parameters, model)
            if is_loading
            else optimizer_state.to_save(state.optimizer, parameters, model)
        )
    sharded["rng"] = ShardedObject(
        "rng", None if is_loading else _rng_state(), (dist.get_world_size(),), (dist.get_rank(),)
    )
    return sharded


def _refuse_other(folder: Path, about: dict[str, Any], state: Checkpointed) -> None:
    found = about.get("format")
    if found != FORMAT:
        raise CheckpointError(f"{folder} is no checkpoint of this program's format {FORMAT} (found {found})")
    mine, its = asdict(state.architecture), about["architecture"]
    differences = [
        f"{key}: checkpoint {its.get(key)!r}, model {mine[key]!r}" for key in mine if its.get(key) != mine[key]
    ]
    if about["precision"] != state.precision:
        differences.append(f"precision: checkpoint {about['precision']!r}, recipe {state.precision!r}")
    if differences:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model than policy.model_name ({'; '.join(differences)}): "
            "use the recipe it was saved with, or another checkpoint folder"
        )


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _make_empty(folder: Path) -> None:
    """Make the folder on rank 0; every rank gets the error."""
    with _rank_0_decides():
        if dist.get_rank() == 0:
            with _as_checkpoint_error(f"cannot make the checkpoint folder {folder}", _ROOM):
                folder.mkdir(parents=True, exist_ok=True)
                occupied = any(folder.iterdir())
            if occupied:
                raise CheckpointError(f"{folder} is not empty: checkpoints are never written over one another")


@contextmanager
def _rank_0_decides() -> Iterator[None]:
    """A CheckpointError on rank 0 is raised on every rank, so that none waits for one that has given up."""
    fault: list[str | None] = [None]
    try:
        yield
    except CheckpointError as error:
        fault = [str(error)]
    dist.broadcast_object_list(fault, src=0)
    if fault[0] is not None:
        raise CheckpointError(fault[0])


@contextmanager
def _as_checkpoint_error(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (*_FAILURES, CheckpointingException, dcp.CheckpointException) as error:
        raise CheckpointError(f"{what}: {_reason(error)}; {advice}") from error


_FAILURES = (
    OSError, RuntimeError, KeyError, ValueError, EOFError, TypeError, AttributeError, pickle.UnpicklingError,
)  # fmt: skip
"""What torch and Megatron raise for files that are cut off, changed, or cannot be written."""


def _reason(error: BaseException) -> str:
    """One line; torch's collected failures come as the traceback of every rank."""
    if isinstance(error, dcp.CheckpointException):
        failed_rank, (first, _) = next(iter(error.failures.items()))
        return f"rank {failed_rank}: {_reason(first)}"
    # torch follows what it found with paragraphs of advice.
    return str(error).split("\n")[0].split(". ")[0] or type(error).__name__
