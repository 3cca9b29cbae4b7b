"""`exgrpo show`, `options` and `simulate`: what a recipe means, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron.arguments import OverridesArgument, RecipeArgument
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan_command import planned_processes, show_plan
from exgrpo_megatron.process import quiet_libraries
from exgrpo_megatron.recipe import dump_recipe, load_recipe, load_with_report, to_show
from exgrpo_megatron.recipe_options import options as recipe_options

# What needs torch is imported inside the commands: show and options answer at once.


def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Processes (one a GPU) to plan for. Default: those of cluster.*", show_default=False),
    ] = None,
    gpu_memory_gib: Annotated[float, typer.Option(min=0.1, help="Memory of one GPU.")] = 80.0,
) -> None:
    """The resolved recipe, what its numbers mean, the variant's switches; on so many GPUs, who holds what."""
    from exgrpo_megatron.report.tables import numbers_table, variant_table  # noqa: PLC0415

    config, of_nemo_rl = load_with_report(recipe, overrides or [])
    processes = planned_processes(config.cluster, world_size)
    console = Console()
    console.print(dump_recipe(to_show(config)), markup=False, highlight=False, soft_wrap=True)
    if of_nemo_rl is not None:
        console.print(of_nemo_rl, "", sep="\n", markup=False, highlight=False, soft_wrap=True)
    data_parallel_size = max(1, (processes or 1) // config.policy.megatron_cfg.model_parallel_size)
    console.print(numbers_table(config, data_parallel_size), "", variant_table(config), sep="\n")
    if processes is not None:
        show_plan(config, processes, gpu_memory_gib, console)


def options(
    prefix: Annotated[str, typer.Argument(help="Only keys that start with this.", show_default=False)] = "",
) -> None:
    """Every recipe key with its default, unit, meaning and possible values."""
    from exgrpo_megatron.report.tables import option_line, options_view  # noqa: PLC0415

    console, listed = Console(), recipe_options(prefix)
    if not listed:
        raise ConfigError(f"no recipe key starts with {prefix!r}; exgrpo options lists them all")
    if console.is_terminal:
        console.print(options_view(listed, console.width))
        return
    for option in listed:
        console.print(option_line(option), markup=False, highlight=False, soft_wrap=True)


def simulate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    rates: Annotated[
        str,
        typer.Option(
            help="True pass rates: uniform, constant:P, beta:A,B; a JSONL or Parquet file with pass_rate, as of "
            "`exgrpo eval`; or a run's folder."
        ),
    ] = "beta:0.6,1.2",
    growth: Annotated[
        str | None,
        typer.Option(
            help="Logits that training adds: none, or new=A,replayed=B,everywhere=C. Default: "
            "new=0.1,replayed=0.1,everywhere=0.004; for a run's folder its logged pass rates",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Default: as many as --rates or the recipe has", show_default=False)
    ] = None,
    distinct: Annotated[
        int | None,
        typer.Option(min=1, help="Different right answers of a question. Default: all differ", show_default=False),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Of a stored answer, for its bytes. Default: half of the longest", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, CSV, picture and metrics.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Replay without a model: what buckets, retirement and new questions come to, from pass rates."""
    config = load_recipe(recipe, overrides or [])
    quiet_libraries()
    from exgrpo_megatron.simulate_command import SimulateRequest, simulate_and_report  # noqa: PLC0415

    simulate_and_report(config, SimulateRequest(rates, growth, questions, distinct, answer_tokens, out, json))
