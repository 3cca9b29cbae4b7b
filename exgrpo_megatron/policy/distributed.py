"""Process groups: the one place that starts and ends them."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from exgrpo_megatron.config import ClusterConfig, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.policy import backend

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer than this for another one gives up; the slowest rollout of a step must fit in it."""


def initialize(policy: PolicyConfig, cluster: ClusterConfig, seed: int) -> DataParallel:
    """Join the process group and lay out Megatron's parallel groups; returns the data-parallel group.

    Under `torchrun` (its environment is set) this is collective over the launched processes. Alone it makes a group
    of one without opening a port. It seeds the global generators of torch, numpy and python in this process, the same
    on every data-parallel rank: checkpoints hold all of them.

    Raises:
        ConfigError: the recipe asks for another number of processes than were launched, or for a layout that does not
            divide them.
    """
    launched = _launched_processes()
    _check_cluster(cluster, launched)
    layout = policy.megatron_cfg
    model_parallel = (
        layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size * layout.context_parallel_size
    )
    if launched % model_parallel:
        raise ConfigError(
            "policy.megatron_cfg: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = "
            f"{model_parallel} does not divide the {launched} launched processes"
        )
    backend.install()
    _join(launched)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds()) // 60,
    )
    _seed(seed)
    return DataParallel()


class DataParallel:
    """The data-parallel group of this rank: a `exgrpo_megatron.comm.Communicator`. Made by `initialize`."""

    def __init__(self) -> None:
        self.rank: int = mpu.get_data_parallel_rank()
        self.size: int = mpu.get_data_parallel_world_size()
        # Objects travel over gloo also where tensors travel over NCCL: no copy through the GPU.
        self._group = mpu.get_data_parallel_group_gloo()

    def all_gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def broadcast(self, value: T) -> T:
        if self.size == 1:
            return value
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._group)

    def shutdown(self) -> None:
        """Leave every group. Call `barrier` first in a normal end: ranks that leave while others wait break them.

        A process that is alone may `initialize` again; processes under torchrun may not, because the store by which
        they find each other still holds the addresses of the first time.
        """
        mpu.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_rank(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is a collective that failed because another process is gone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or any(text in str(cause) for text in _PEER_IS_GONE):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo (a plain RuntimeError) and NCCL say then."""


def _launched_processes() -> int:
    return int(os.environ["WORLD_SIZE"]) if _under_torchrun() else 1


def _under_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _check_cluster(cluster: ClusterConfig, launched: int) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", launched)) if _under_torchrun() else 1
    nodes = cluster.num_nodes or max(1, launched // local)
    per_node = cluster.gpus_per_node or local
    if nodes * per_node != launched:
        raise ConfigError(
            f"cluster.num_nodes * cluster.gpus_per_node = {nodes} * {per_node} = {nodes * per_node} is not the number "
            f"of launched processes, {launched}: launch with torchrun --nnodes {nodes} --nproc-per-node {per_node}, or "
            "set both keys to null to use however many are launched"
        )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes no larger one
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _join(launched: int) -> None:
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; call DataParallel.shutdown() before initialize()")
    name = "nccl" if torch.cuda.is_available() else "gloo"
    if not _under_torchrun():
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(name, timeout=COLLECTIVE_TIMEOUT)
    assert dist.get_world_size() == launched, (dist.get_world_size(), launched)
