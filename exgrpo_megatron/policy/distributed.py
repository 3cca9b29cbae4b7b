"""Process groups: the one place that starts and ends them."""

from __future__ import annotations

import math
import os
import random
import socket
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from exgrpo_megatron.acceleration import choose
from exgrpo_megatron.accelerators import installed
from exgrpo_megatron.config import ClusterConfig, MegatronConfig, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.places import Places
from exgrpo_megatron.policy import backend

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""A rank that waits longer than this for another one gives up, where nobody watches over it."""

PATIENCE = 4
"""A collective's limit in `cluster.hang_timeout_s`: whoever watches (`hang.py`) says first who is missing, and waits
for ranks that still move."""

_STORE_TIMEOUT = timedelta(seconds=30)


def initialize(policy: PolicyConfig, cluster: ClusterConfig, seed: int, places: Places | None = None) -> DataParallel:
    """Join the process group and lay out Megatron's parallel groups.

    Under `torchrun` (its environment is set) this is collective over the launched processes. Alone it makes a group
    of one without opening a port. It seeds the global generators of torch, numpy and python in this process, the same
    on every data-parallel rank: checkpoints hold all of them. `places` are what the communicator says of itself.

    Raises:
        ConfigError: the recipe asks for another number of processes than were launched, for a layout that does not
            divide them, or for what does not work on this machine; or the processes' machines can do different things.
    """
    launched = _launched_processes()
    _check_cluster(cluster, launched)
    layout = policy.megatron_cfg
    if launched % layout.model_parallel_size:
        raise ConfigError(
            "policy.megatron_cfg: tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size = "
            f"{layout.model_parallel_size} does not divide the number of launched processes, {launched}"
        )
    choose(policy, installed())
    backend.install()
    places = places or Places()
    timeout = timedelta(seconds=max(60.0, PATIENCE * cluster.hang_timeout_s))
    with places.inside("joining the process group"):
        _join(launched, timeout)
        comm = lay_out(layout, seed, places, timeout)
    check_alike(comm, installed().fingerprint())
    return comm


def side_store() -> dist.Store:
    """A connection of its own to the store by which the processes under torchrun found each other, for another thread.

    Raises:
        RuntimeError: nobody answers there.
    """
    if not _under_torchrun():
        return dist.HashStore()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
    )
    # torchrun keeps its store when it starts the processes again.
    return dist.PrefixStore(f"exgrpo/places/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def lay_out(
    layout: MegatronConfig, seed: int, places: Places | None = None, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> DataParallel:
    """Megatron's groups among the processes of the process group that is there, and the seeds of `initialize`."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
    )
    _seed(seed)
    return DataParallel(places, timeout)


def check_alike(comm: DataParallel, mine: str) -> None:
    """Raise ConfigError, on every rank, where `mine`, what it found of GPU packages, is not the same on all.

    Ranks with different layers or optimizers would wait for one another in different places, or not agree.
    """
    first = comm.broadcast(mine)
    if comm.anywhere(mine != first):
        other = f"; this one ({socket.gethostname()}): {mine}" if mine != first else ""
        raise ConfigError(
            f"the processes do not find the same GPU packages: rank 0: {first}{other}. Install the same on all "
            "machines, or leave it out on all (exgrpo doctor says what is there)"
        )


class DataParallel:
    """The processes of the run: a `exgrpo_megatron.comm.Communicator`. Made by `initialize`."""

    def __init__(self, places: Places | None = None, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self.places = places or Places()
        self.rank: int = mpu.get_data_parallel_rank()
        self.size: int = mpu.get_data_parallel_world_size()
        # Megatron's model-parallel group is tensor and pipeline ranks; each stands for its context-parallel ones.
        context, model = mpu.get_context_parallel_group(), mpu.get_model_parallel_group()
        self.member: int = dist.get_rank(model) * dist.get_world_size(context) + dist.get_rank(context)
        self.members: int = dist.get_world_size(model) * dist.get_world_size(context)
        self.world_size: int = dist.get_world_size()
        self.is_main: bool = dist.get_rank() == 0
        # Objects travel over gloo also where tensors travel over NCCL: no copy through the GPU.
        self._group = mpu.get_data_parallel_group_gloo()
        self._world: Any = (
            dist.new_group(backend="gloo", timeout=timeout) if torch.cuda.is_available() else dist.group.WORLD
        )
        self._machine = socket.gethostname()
        self._processes = _gather((self._machine, os.getpid()), self._world)

    def all_gather(self, value: T) -> list[T]:
        with self.places.inside("gathering"):
            return self._agreed(_gather(value, self._group))

    def agreed(self, value: T) -> T:
        with self.places.inside("agreeing"):
            return self._agreed(value)

    def _agreed(self, value: T) -> T:
        # Megatron's model-parallel group is tensor and pipeline ranks. First the context-parallel ranks of each of
        # these agree, then these do.
        for group in (mpu.get_context_parallel_group(), mpu.get_model_parallel_group()):
            value = _broadcast(value, dist.get_process_group_ranks(group)[0], group)
        return value

    def gather_members(self, value: T) -> list[T]:
        with self.places.inside("gathering"):
            parts = _gather(_gather(value, mpu.get_context_parallel_group()), mpu.get_model_parallel_group())
        return [value for part in parts for value in part]

    def anywhere(self, flag: bool) -> bool:
        with self.places.inside("agreeing"):
            return any(_gather(flag, self._world))

    def broadcast(self, value: T) -> T:
        with self.places.inside("receiving from rank 0"):
            return _broadcast(value, 0, self._world)

    def barrier(self) -> None:
        if self.world_size > 1:
            with self.places.inside("barrier"):
                dist.barrier(group=self._world)

    def killed_ranks(self) -> tuple[int, ...]:
        """The ranks on this machine whose process is gone; not collective."""
        return tuple(
            rank
            for rank, (machine, process) in enumerate(self._processes)
            if machine == self._machine and _is_gone(process)
        )

    def shutdown(self) -> None:
        """Leave every group. Call `barrier` first in a normal end: ranks that leave while others wait break them.

        A process that is alone may `initialize` again; processes under torchrun may not, because the store by which
        they find each other still holds the addresses of the first time.
        """
        mpu.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def from_last_stage(value: T) -> T:
    """On all ranks that share the model, the value of the last pipeline stage (of its first tensor-parallel rank).

    Ranks that compute the same thing may differ in the last bit, and a decision taken on it must be one decision.
    Context-parallel ranks of that tensor-parallel rank must have exchanged it already.
    """
    group = mpu.get_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return value
    # With the first tensor-parallel rank as the source, which sits in one pipeline group with the others' first ones.
    first_rank_of_last_stage = dist.get_process_group_ranks(group)[-mpu.get_tensor_model_parallel_world_size()]
    return _broadcast(value, first_rank_of_last_stage, group)


def lost_rank(error: BaseException) -> bool:
    """Whether `error`, or what caused it, is a collective that failed because another process is gone."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or any(text in str(cause) for text in _PEER_IS_GONE):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of every rank of the group (None: of all processes), in its order."""
    gathered: list[Any] = [value]
    if dist.get_world_size(group) > 1:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def _broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """The value of global rank `source` on every rank of `group`."""
    if dist.get_world_size(group) == 1:
        return value
    box: list[Any] = [value if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


_PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""What gloo (a plain RuntimeError) and NCCL say then."""


def _is_gone(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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


def _join(launched: int, timeout: timedelta) -> None:
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; call DataParallel.shutdown() before initialize()")
    name = "nccl" if torch.cuda.is_available() else "gloo"
    if not _under_torchrun():
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(name, timeout=timeout)
    assert dist.get_world_size() == launched, (dist.get_world_size(), launched)
