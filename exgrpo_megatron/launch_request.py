"""What `exgrpo launch` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.launch_command import SlurmJob


@dataclass(frozen=True)
class Ask:
    """What of a cluster is asked for; `None` is the recipe's, or Slurm's default."""

    nodes: int | None
    gpus_per_node: int | None
    name: str
    partition: str | None
    account: str | None
    time: str | None
    stop_before_s: int

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Raise ConfigError where an override says another number of machines or processes than its option."""
        asked = {
            "cluster.num_nodes": ("--nodes", self.nodes),
            "cluster.gpus_per_node": ("--gpus-per-node", self.gpus_per_node),
        }
        for override in overrides:
            key, _, value = override.partition("=")
            option, number = asked.get(key, ("", None))
            if number is not None and value.strip() not in ("null", str(number)):
                raise ConfigError(
                    f"{option} {number} sets {key} for the run, but {override} is given too: leave one out"
                )

    def job(self, config: Config, processes: int) -> SlurmJob:
        """With the recipe's machines, and `processes` of each where neither it nor the command line says."""
        return SlurmJob(
            nodes=self.nodes or config.cluster.num_nodes or 1,
            gpus_per_node=self.gpus_per_node or config.cluster.gpus_per_node or processes,
            name=self.name,
            partition=self.partition,
            account=self.account,
            time=self.time,
            stop_before_s=self.stop_before_s,
        )


@dataclass(frozen=True)
class Place:
    """Where the job runs."""

    python: str
    folder: Path | None
    container_image: str | None
    container_mounts: tuple[str, ...]
    ssh: str | None
    job_dir: str | None

    @property
    def of_nemo_run(self) -> dict[str, object]:
        """What only NeMo-Run's Slurm executor takes, by option."""
        return {
            "--container-image": self.container_image,
            "--container-mount": self.container_mounts,
            "--ssh": self.ssh,
            "--job-dir": self.job_dir,
        }

    def folder_or_this(self) -> str:
        """The job's folder, this one by default."""
        return str(self.folder or Path.cwd())


@dataclass(frozen=True)
class LaunchRequest:
    """A launch through NeMo-Run."""

    recipe: Path
    overrides: tuple[str, ...]
    executor: str
    ask: Ask
    place: Place
    dry_run: bool
