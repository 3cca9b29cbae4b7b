"""`exgrpo launch`: a recipe on a cluster, or through NeMo-Run, from an environment that needs no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron.arguments import OverridesArgument
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.launch_command import batch_file, check_job, machine_overrides, training_python
from exgrpo_megatron.launch_request import Ask, LaunchRequest, Place
from exgrpo_megatron.process import quiet_libraries
from exgrpo_megatron.recipe import load_recipe


class ExecutorName(StrEnum):
    """NeMo-Run's executors that `exgrpo launch` makes."""

    slurm = "slurm"
    local = "local"


def launch(
    recipe: Annotated[
        Path, typer.Argument(help="Recipe file, or with --executor a task in NeMo-Run's YAML.", show_default=False)
    ],
    overrides: OverridesArgument = None,
    executor: Annotated[
        ExecutorName | None,
        typer.Option(
            help="Through NeMo-Run. slurm: submit the job. local: train on this machine, to the end. Default: without "
            "NeMo-Run, write a batch file and submit nothing",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --executor: print all that would be submitted, and submit nothing.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Machines; sets cluster.num_nodes for the run. Default: as it is there; 1 where that is null",
            show_default=False,
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes of a machine; sets cluster.gpus_per_node for the run. Default: as it is there; where that "
            "is null 8, and 1 with --executor local",
            show_default=False,
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(show_default=False)] = None,
    account: Annotated[str | None, typer.Option(help="NeMo-Run's slurm needs one.", show_default=False)] = None,
    time: Annotated[str | None, typer.Option(help="Limit, as sbatch takes it.", show_default=False)] = None,
    stop_before_s: Annotated[
        int, typer.Option(help="The run saves and stops so long before the limit: longer than a step.")
    ] = 600,
    job_name: Annotated[str | None, typer.Option(help="Default: that of the recipe file", show_default=False)] = None,
    python: Annotated[
        str, typer.Option(help="Python that trains, as the machines see it. Default: this one", show_default=False)
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the job runs, as the machines see it. Default: this folder", show_default=False),
    ] = None,
    container_image: Annotated[
        str | None, typer.Option(help="With --executor slurm, for Pyxis.", show_default=False)
    ] = None,
    container_mount: Annotated[
        list[str] | None, typer.Option(help="source:target; may be given several times.", show_default=False)
    ] = None,
    ssh: Annotated[
        str | None,
        typer.Option(help="user@host of the cluster, where --executor slurm is not on it.", show_default=False),
    ] = None,
    job_dir: Annotated[
        str | None, typer.Option(help="With --ssh: folder there for what is brought.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write, without --executor. Default: standard output", show_default=False),
    ] = None,
) -> None:
    """Train a recipe on a cluster with Slurm: write a batch file, or launch it through NeMo-Run."""
    place = Place(python, folder, container_image, tuple(container_mount or ()), ssh, job_dir)
    ask = Ask(nodes, gpus_per_node, job_name or recipe.stem, partition, account, time, stop_before_s)
    ask.check_overrides(overrides or [])
    if executor is None:
        _refuse("without --executor", {"--dry-run": dry_run, **place.of_nemo_run})
        _write_batch_file(recipe, overrides or [], ask, place, output)
        return
    _refuse("with --executor, which writes no file", {"--output": output is not None})
    if executor is ExecutorName.local:
        asked = {"--partition": partition, "--account": account, "--time": time, "--nodes": (nodes or 1) > 1}
        _refuse("with --executor local", {**asked, **place.of_nemo_run})
    _need_nemo_run()
    quiet_libraries()
    from exgrpo_megatron.nemo.command import launch_and_report  # noqa: PLC0415

    launch_and_report(LaunchRequest(recipe, tuple(overrides or ()), executor.value, ask, place, dry_run))


def _refuse(where: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError for options that would do nothing."""
    names = [name for name, value in given.items() if value]
    if names:
        raise ConfigError(f"{', '.join(names)}: no meaning {where}")


def _need_nemo_run() -> None:
    if importlib.util.find_spec("nemo_run") is None:
        raise ConfigError(
            "--executor needs NeMo-Run, which is not installed here: `make setup-others` in the repository makes an "
            "environment for launching, then .venv-launcher/bin/exgrpo launch ... (elsewhere: the extra `launcher`, "
            "docs/nemo.md); or leave --executor out, which writes a batch file for sbatch without NeMo-Run"
        )


def _write_batch_file(recipe: Path, overrides: list[str], ask: Ask, place: Place, output: Path | None) -> None:
    config = load_recipe(recipe, overrides)
    job = ask.job(config, processes=8)
    check_job(config, job)
    overrides = [*overrides, *machine_overrides(config, job)]
    text = batch_file(job, recipe, overrides, training_python(place.python), place.folder_or_this())
    if output is None:
        sys.stdout.write(text)
        return
    replace_text(output, text)
    Console().print(
        f"written to {output}; submit it with: sbatch {output}", markup=False, highlight=False, soft_wrap=True
    )
