"""The files of a Megatron checkpoint (format `torch_dist`), written in this process and in any of its threads.

Megatron's own writer starts a process with `spawn` (which runs a script without a `__main__` guard a second time) and
forks another: seconds of start-up for a small model, and both outlive a killed trainer. It also writes in the middle of
collectives. Here `plan` is collective, `ShardedFiles.write` is not, and `ShardedFiles.finish` is collective again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import _StoragePrefix

COMMON_FILE, METADATA_FILE, FORMAT_FILE = "common.pt", ".metadata", "metadata.json"
"""What is the same on every rank; which tensor lies where; the name of the format. The last two are written last."""


def plan(folder: Path, state: dict[str, Any], *, snapshot: bool) -> ShardedFiles:
    """This rank's part in writing `state` into `folder`; collective over all processes.

    `state` holds Megatron's sharded tensors and objects, and what is the same on every rank. `snapshot`: copy the
    tensors to host memory now, so that they may be changed before they are written.
    """
    sharded, common = save_preprocess(state)
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    if snapshot:
        grouped = {key: [_on_host(part) for part in parts] for key, parts in grouped.items()}
    return ShardedFiles(folder, mcore_to_pyt_state_dict(grouped, False), common, snapshot=snapshot)


class ShardedFiles:
    """What this rank writes of a checkpoint."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any], common: Mapping[str, Any], *, snapshot: bool) -> None:
        self.folder = folder
        self._common = dict(common)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(dict(tensors), is_coordinator=dist.get_rank() == 0)
        self._plan = self._planner.create_local_plan()
        # Copies are on the host already: without copying ahead, the writing thread never touches a GPU.
        ahead_bytes = 0 if snapshot else 10_000_000
        self._writer = _Writer(folder, thread_count=1, per_thread_copy_ahead=ahead_bytes)
        self._written: list[Any] = []

    def write(self) -> list[Path]:
        """Write this rank's share and return its files; not collective, and allowed in any thread.

        Raises:
            OSError: it cannot be written.
        """
        files = [f"__{dist.get_rank()}_0.distcp"]
        own = replace(self._plan, storage_data=_StoragePrefix(f"__{dist.get_rank()}_"))
        self._written = self._writer.write_data(own, self._planner).wait()
        if dist.get_rank() == 0:
            torch.save(self._common, self.folder / COMMON_FILE)
            files.append(COMMON_FILE)
        return [self.folder / name for name in files]

    def finish(self) -> None:
        """Write what makes the files a checkpoint, once every rank's `write` has returned; collective.

        Raises:
            OSError: on rank 0, where that cannot be written.
            ValueError: on rank 0, where the ranks' shares do not make up the whole state.
        """
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self._plan, self._written), gathered, dst=0)
        if gathered is not None:
            plans, written = zip(*gathered, strict=True)
            _, metadata = self._planner.create_global_plan(list(plans))
            self._writer.finish(metadata, list(written))
            save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))


def _on_host(part: Any) -> Any:
    """A sharded tensor with its data copied; objects are copied where they are turned into bytes."""
    if not isinstance(part, ShardedTensor):
        return part
    return replace(part, data=part.data.detach().to("cpu", copy=True))


class _Writer(dcp.FileSystemWriter):
    """Says that the disk is full where torch's zip writer only says that its file has an unexpected length."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror) from error
            raise
