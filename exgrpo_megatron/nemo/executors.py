"""NeMo-Run's executors from plain arguments, with what a run needs to survive time limits and preemption."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import nemo_run as run

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.launch_command import MEETING_POINT, PASS_ON_SIGNALS, SlurmJob, check_values


@dataclass(frozen=True)
class Remote:
    """A cluster that is reached by SSH, with the keys and settings of the user's SSH."""

    login: str
    """user@host"""
    job_dir: str
    """Folder on the cluster for what NeMo-Run brings there; all nodes must see it."""


def local_executor(env_vars: Mapping[str, str] | None = None) -> run.LocalExecutor:
    """For this machine: one torchrun, which the task starts itself."""
    return run.LocalExecutor(packager=run.Packager(), env_vars=dict(env_vars or {}))


def slurm_executor(
    job: SlurmJob,
    *,
    container_image: str | None = None,
    container_mounts: Sequence[str] = (),
    remote: Remote | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> run.SlurmExecutor:
    """For a cluster with Slurm: one task a node, which starts torchrun there.

    `job.stop_before_s` before the time limit every rank saves, and the job queues itself again; so it does after
    preemption and after a node was lost, and goes on from its newest checkpoint. An error ends it (`retries` is 0:
    NeMo-Run would repeat any error).

    Args:
        job: what Slurm is asked for. An account is needed.
        container_image: for Pyxis; it needs exgrpo-megatron, not NeMo-Run. Default: no container.
        container_mounts: `source:target` each.
        remote: Default: Slurm's commands are here, and all nodes see NeMo-Run's folder (NEMORUN_HOME).
        env_vars: for the processes.

    Raises:
        ConfigError: no account, or a text that would not reach Slurm as it is: NeMo-Run quotes none.
    """
    check_values(job)
    for option, text in (("--container-image", container_image or ""), ("--job-dir", remote.job_dir if remote else "")):
        _check_word(option, text)
    for mount in container_mounts:
        _check_word("--container-mount", mount, of="A-Za-z0-9_./:@#+=%-")  # a comma begins another
    if job.account is None:
        raise ConfigError("--account: NeMo-Run's Slurm executor needs one")
    return run.SlurmExecutor(
        account=job.account,
        partition=job.partition,
        time=job.time,
        nodes=job.nodes,
        ntasks_per_node=1,
        gpus_per_node=job.gpus_per_node,
        signal=f"B:USR1@{job.stop_before_s}" if job.time else None,
        container_image=container_image,
        container_mounts=list(container_mounts),
        additional_parameters={"job_name": job.name, "requeue": True},
        srun_args=[f"--ntasks={job.nodes}", "--ntasks-per-node=1"],
        setup_lines=_SETUP,
        packager=run.Packager(),
        tunnel=_tunnel(remote),
        env_vars=_quoted(env_vars or {}),
        retries=0,
        poll_estimated_start_time=False,
    )


def _check_word(option: str, text: str, of: str = "A-Za-z0-9_./:@#+=%,-") -> None:
    """Raise ConfigError for what a shell would split, expand, or run."""
    if not re.fullmatch(f"[{of}]*", text):
        raise ConfigError(
            f"{option} {text!r}: NeMo-Run writes it into the batch file without quotes, so only ASCII letters, digits "
            f"and {' '.join(of.removeprefix('A-Za-z0-9'))} can be in it; give the place another name, by a link for "
            "example"
        )


def _quoted(env_vars: Mapping[str, str]) -> dict[str, str]:
    """For NeMo-Run, which writes `export NAME=value` as it is."""
    for name in env_vars:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"env_vars: {name!r} is no name of a variable")
    return {name: shlex.quote(value) for name, value in env_vars.items()}


def _tunnel(remote: Remote | None) -> run.LocalTunnel | run.SSHTunnel:
    if remote is None:
        return run.LocalTunnel(job_dir="")
    user, _, host = remote.login.partition("@")
    if not re.fullmatch(r"\w[\w.-]*@\w[\w.-]*", remote.login, re.ASCII):
        raise ConfigError(f"--ssh {remote.login!r}: write it as user@host")
    return run.SSHTunnel(host=host, user=user, job_dir=remote.job_dir)


# NeMo-Run's batch file runs srun in the foreground, where bash does not act on a signal before srun has ended.
_SETUP = f"""\
{MEETING_POINT}
srun() {{
command srun "$@" &
{PASS_ON_SIGNALS}return "$status"
}}
"""
