"""`exgrpo launch`: a batch file for Slurm, in which every node runs torchrun and all meet at the first one."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan.ranks import lay_out

_KILL_S = 60
"""Between the end of torchrun's patience with its ranks and that of Slurm's with the job."""

_RESOLUTION_S = 60
"""Slurm sends a signal up to so long before it is due."""

_MAX_SIGNAL_S = 65_535
"""The longest time of `--signal`."""

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


@dataclass(frozen=True)
class SlurmJob:
    """What Slurm is asked for."""

    nodes: int
    gpus_per_node: int
    name: str
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    """Limit, as sbatch takes it."""
    stop_before_s: int = 600
    """How long before the limit the run is told to save and stop: longer than a step."""


def check_job(config: Config, job: SlurmJob) -> None:
    """Raise ConfigError where the recipe's layout does not divide the job's processes, or a value is none that sbatch
    would take."""
    world_size = job.nodes * job.gpus_per_node
    try:
        lay_out(world_size, config.policy.megatron_cfg)
    except ConfigError as error:
        asked = f"--nodes {job.nodes} --gpus-per-node {job.gpus_per_node}"
        raise ConfigError(f"{asked}: {error}; give other numbers, or change the layout") from None
    check_values(job)


def check_values(job: SlurmJob) -> None:
    """Raise ConfigError for a value that sbatch would not take, or take for something else."""
    if not _KILL_S < job.stop_before_s <= _MAX_SIGNAL_S:
        raise ConfigError(
            f"--stop-before-s {job.stop_before_s}: must be more than {_KILL_S} and longer than a step, and at most "
            f"{_MAX_SIGNAL_S}, the most sbatch takes"
        )
    if job.time is not None:
        _check_time(job.time, job.stop_before_s)
    for option, value in (("--job-name", job.name), ("--partition", job.partition), ("--account", job.account)):
        if value is not None and not re.fullmatch(r"[\w.,@+-]+", value):
            raise ConfigError(f"{option} {value!r}: letters, digits and . , _ @ + - only")


def machine_overrides(config: Config, job: SlurmJob) -> list[str]:
    """What the recipe's numbers of machines and processes are to be, where they are other than the job's; null is as
    many as are launched."""
    wanted = {"num_nodes": job.nodes, "gpus_per_node": job.gpus_per_node}
    return [
        f"cluster.{name}={number}"
        for name, number in wanted.items()
        if getattr(config.cluster, name) not in (None, number)
    ]


def check_text(option: str, value: str, others: str = "") -> None:
    """Raise ConfigError for a line break or another control character, or one of `others`: it would end its line in a
    batch file, or be read otherwise than it is written."""
    found = next((char for char in value if char in others or not char.isprintable()), None)
    if found is not None:
        raise ConfigError(f"{option} {value!r}: has {found!r}, which cannot stand in a batch file")


def training_python(given: str) -> str:
    """The Python that trains: `given`, or this one where it is empty.

    Raises:
        ConfigError: none is given and this one has no torch, as in an environment for launching alone.
    """
    if not given and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "this environment has no torch and cannot train: name the Python that does, as the nodes see it, with "
            "--python /path/to/environment/bin/python"
        )
    return given or sys.executable


def batch_file(job: SlurmJob, recipe: Path, overrides: Sequence[str], python: str, folder: str) -> str:
    """The text of the batch file. All nodes must see the paths; the recipe's is relative to `folder`.

    Raises:
        ConfigError: a path or override that cannot stand in one.
    """
    check_text("--folder", folder, "'\"\\")  # sbatch reads quotes by rules of its own
    for option, value in (("recipe", str(recipe)), ("--python", python), *(("override", one) for one in overrides)):
        check_text(option, value)
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.stop_before_s}" if job.time else None,
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
        "chdir": shlex.quote(folder),
    }
    asked = "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None)
    arguments = " ".join(map(shlex.quote, ["train", str(recipe), *overrides]))
    return _TEMPLATE.format(
        asked=asked,
        python=shlex.quote(python),
        nodes=job.nodes,
        torchrun=torchrun_options(job.nodes, job.gpus_per_node, job.stop_before_s),
        arguments=arguments,
        meeting_point=MEETING_POINT,
        pass_on_signals=PASS_ON_SIGNALS,
    )


def torchrun_options(nodes: int, processes_per_node: int, stop_before_s: int) -> str:
    """What torchrun is told on every machine of a job; those of several meet where MEETING_POINT says."""
    meeting = (
        "--rdzv-endpoint=127.0.0.1:0"
        if nodes == 1
        else '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'
    )
    return (
        f"--nnodes={nodes} --nproc-per-node={processes_per_node} --max-restarts=0 "
        f"--shutdown-timeout={stop_before_s - _KILL_S} \\\n    --rdzv-backend=c10d {meeting}"
    )


def _check_time(time: str, stop_before_s: int) -> None:
    limit = time_limit_s(time)
    if limit is None:
        raise ConfigError(f"--time {time!r}: give minutes[:seconds], hours:minutes:seconds, or days-hours[:...]")
    if limit and limit <= stop_before_s + _RESOLUTION_S:  # 0 is no limit
        raise ConfigError(
            f"--time {time} is {limit} s, not more than --stop-before-s {stop_before_s} and the {_RESOLUTION_S} s by "
            "which Slurm may be early: the run would be stopped as soon as it began, and queued again, for ever; raise "
            "the one or lower the other"
        )


def time_limit_s(time: str) -> int | None:
    """Seconds of a limit as sbatch takes it: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]];
    None where it is none of these."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


MEETING_POINT = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
"""
"""Lines of a batch file: where the torchruns of its nodes meet."""

PASS_ON_SIGNALS = """\
step=$!

# Every rank finishes its step and saves on SIGTERM. USR1 comes before the time limit; TERM of scancel and preemption.
limit_reached=0
trap 'limit_reached=1; kill -TERM "$step"' USR1
trap 'kill -TERM "$step"' TERM

status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends the wait, not the step
    status=0
    wait "$step" || status=$?
done
# A preempted job that ends before its grace is over need not be queued again by Slurm, which signals the ranks and not
# this script; where it was, this changes nothing.
preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; }
if [ "$limit_reached" -eq 1 ] || { [ "$status" -ne 0 ] && preempted; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
"""Lines of a batch file, after srun in the background: its exit code is in `status` then."""

_TEMPLATE = """\
#!/usr/bin/env bash
{asked}
#SBATCH --requeue
#
# Submit it with sbatch. A node that fails, the time limit and preemption put the job back into the queue, and it goes
# on from its newest checkpoint; an error ends it.
set -u

{meeting_point}
# One torchrun a node. The first one that ends with an error ends the others: a lost node must not leave them waiting.
srun --kill-on-bad-exit=1 --ntasks={nodes} --ntasks-per-node=1 \\
    {python} -m torch.distributed.run \\
    {torchrun} \\
    -m exgrpo_megatron {arguments} &
{pass_on_signals}exit "$status"
"""
