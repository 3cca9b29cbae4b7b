"""`exgrpo launch --executor`: from a recipe file to a job of NeMo-Run."""

from __future__ import annotations

import sys

import nemo_run as run

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.launch_command import SlurmJob, check_job
from exgrpo_megatron.launch_request import LaunchRequest, Place
from exgrpo_megatron.nemo.executors import Remote, local_executor, slurm_executor
from exgrpo_megatron.nemo.launching import dry_run, run_here, script, submit
from exgrpo_megatron.nemo.partials import is_nemo_run_yaml, read_yaml, recipe, resolve


def launch_and_report(request: LaunchRequest) -> None:
    """Submit, run, or print what would be.

    Raises:
        ConfigError: what was asked for does not fit the recipe, or is incomplete.
        UserError: the job was not taken, or failed.
    """
    local = request.executor == "local"
    task, job = _task(request, processes=1 if local else 8)
    executor = local_executor() if local else _slurm(request.place, job)
    job_script = script(task, job.stop_before_s, stoppable=local)
    if request.dry_run:
        sys.stdout.write(dry_run(job_script, executor, job.name))
    elif isinstance(executor, run.LocalExecutor):
        run_here(job_script, executor, job.name)
    else:
        sys.stdout.write(submit(job_script, executor, job.name) + "\n")


def _task(request: LaunchRequest, processes: int) -> tuple[run.Partial, SlurmJob]:
    """With the machines and processes of the job in it."""
    read = read_yaml if is_nemo_run_yaml(request.recipe) else recipe
    job = request.ask.job(resolve(read(request.recipe, request.overrides)), processes)
    machines = [f"cluster.num_nodes={job.nodes}", f"cluster.gpus_per_node={job.gpus_per_node}"]
    task = read(request.recipe, [*request.overrides, *machines])
    check_job(resolve(task), job)
    place = request.place
    _check_place(place, task)
    task.python = place.python or task.python
    task.folder = str(place.folder or task.folder or place.folder_or_this())
    return task, job


def _check_place(place: Place, task: run.Partial) -> None:
    elsewhere = "--ssh" if place.ssh else "--container-image" if place.container_image else None
    if elsewhere and not (place.python or task.python):
        raise ConfigError(f"{elsewhere}: also give --python, which is another one there than here")
    if elsewhere and not (place.folder or task.folder):
        raise ConfigError(f"{elsewhere}: also give --folder, where to run there: the recipe's paths are relative to it")
    if (place.ssh is None) != (place.job_dir is None):
        raise ConfigError("--ssh and --job-dir belong together: the cluster, and a folder there that all its nodes see")
    if place.container_mounts and place.container_image is None:
        raise ConfigError("--container-mount: no meaning without --container-image")


def _slurm(place: Place, job: SlurmJob) -> run.SlurmExecutor:
    remote = Remote(place.ssh, place.job_dir) if place.ssh and place.job_dir else None
    return slurm_executor(
        job, container_image=place.container_image, container_mounts=place.container_mounts, remote=remote
    )
