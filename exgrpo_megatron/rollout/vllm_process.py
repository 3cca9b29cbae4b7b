"""Starting vLLM in, or beside, a process that already trains, and ending it without harm to the trainer.

vLLM takes a process for its own: it seeds the global generators, replaces `torch.set_num_threads`, and ends every
process group when an engine is shut down. All of that is undone here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from exgrpo_megatron.config import VllmConfig


@dataclass(frozen=True)
class VLLMSettings:
    """What one engine is made of; `cfg` with its nulls resolved beside it."""

    model_dir: Path
    """Hugging Face folder with the model's configuration; weights are not read from it."""
    cfg: VllmConfig
    dtype: torch.dtype
    max_model_len: int
    max_batch_size: int
    kv_cache_bytes: int | None


def start(settings: VLLMSettings) -> Any:
    """A `vllm.LLM` with arbitrary weights.

    Collective over all processes unless `separate_process`: vLLM makes process groups inside the trainer's. So the
    trainer's must exist by now, or each process would silently become a group of one.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != launched:
        raise RuntimeError(f"{launched} processes were launched, but the process group has {joined}: join it first")
    with _environment(settings.cfg), _process_state_kept():
        llm = _build(settings)
    assert not dist.is_initialized() or dist.get_world_size() == launched, "vLLM replaced the default process group"
    return llm


def stop(llm: Any) -> None:
    """End the engine; the trainer's process groups stay."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def kill(llm: Any) -> None:
    """End an engine that runs in a process of its own and does not answer; its next use fails at once."""
    for process in worker_processes(llm):
        process.kill()


def worker_processes(llm: Any) -> list[Any]:
    """The processes of an engine made with `separate_process` (`multiprocessing.Process`)."""
    return list(llm.llm_engine.engine_core.resources.engine_manager.processes)


@contextlib.contextmanager
def watched(llm: Any, seconds: float = math.inf) -> Iterator[None]:
    """Inside, a call to an engine in a process of its own raises when that process ends; after `seconds` it is killed.

    vLLM notices such an end, but leaves a call that waits for an answer waiting.
    """
    over, deadline = threading.Event(), time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            if time.monotonic() > deadline:
                kill(llm)
            if not all(process.is_alive() for process in worker_processes(llm)):
                _end_waiting(llm)

    watcher = threading.Thread(target=watch, name="vllm-watcher", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


_SECONDS_BETWEEN_LOOKS = 0.2


def _end_waiting(llm: Any) -> None:
    """Make every call that waits for the engine raise."""
    client, error = llm.llm_engine.engine_core, RuntimeError("the engine's process ended")
    if client.outputs_queue.empty():
        client.outputs_queue.put_nowait(error)
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(error)


def any_member(flag: bool) -> bool:
    """Whether the flag is set on any rank that shares this process's engine; collective over them."""
    from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415

    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return bool(flags)


def _build(settings: VLLMSettings) -> Any:
    # Else it says at every start that there is no triton, which a CPU has no use for.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    import vllm  # noqa: PLC0415
    from vllm.config.weight_transfer import WeightTransferConfig  # noqa: PLC0415
    from vllm.distributed import parallel_state  # noqa: PLC0415

    from exgrpo_megatron.rollout.vllm_worker import BACKEND, Extension  # noqa: PLC0415

    parallel_state.destroy_distributed_environment = _leave_own_groups
    cfg = settings.cfg
    together = {"tensor_parallel_size": cfg.tensor_parallel_size, "distributed_executor_backend": "external_launcher"}
    return vllm.LLM(
        str(settings.model_dir),
        dtype=str(settings.dtype).removeprefix("torch."),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",  # its own neutral values, not those of the model folder
        logprobs_mode="processed_logprobs",
        seed=0,  # of nothing: every request has its own
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_batch_size,
        enforce_eager=cfg.enforce_eager,
        enable_prefix_caching=cfg.enable_prefix_caching,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_sleep_mode=torch.cuda.is_available(),
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=f"{Extension.__module__}.{Extension.__qualname__}",
        disable_log_stats=True,
        **(together if cfg.tensor_parallel_size > 1 else {}),
    )


def _leave_own_groups() -> None:
    """In place of vLLM's function of that purpose, which ends the default group and with it every other."""
    from vllm.distributed import parallel_state  # noqa: PLC0415

    if parallel_state._WORLD is not None and dist.is_initialized():
        parallel_state._WORLD.destroy()
    parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


@contextlib.contextmanager
def _environment(cfg: VllmConfig) -> Iterator[None]:
    """vLLM's switches that exist as environment variables only, for the time of the build."""
    changes: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(cfg.separate_process)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy the trainer's threads in whatever state they are
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are the trainer's too
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if cfg.enforce_eager and not torch.cuda.is_available():
        # Read when vLLM is imported: else it compiles its log-probs with a C++ compiler, which takes many seconds.
        changes["TORCHDYNAMO_DISABLE"] = "1"
    if cfg.separate_process:
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        elastic = [name for name in os.environ if name.startswith("TORCHELASTIC_")]
        changes.update(dict.fromkeys([*launcher, *elastic]))
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Generators and threads are afterwards as they were."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
