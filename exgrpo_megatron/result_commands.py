"""`exgrpo sweep`, `report` and `debug`: runs compared, one run looked at, and one step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.process import process_group, quiet_libraries

# What draws pictures is imported inside the commands.


def sweep(
    recipes: Annotated[
        list[str], typer.Argument(metavar="[NAME=]RECIPE...", help="Recipe files (YAML).", show_default=False)
    ],
    seeds: Annotated[str, typer.Option(help="Such as 1,2,5-8.")] = "1-3",
    arm: Annotated[
        list[str] | None,
        typer.Option(help="'NAME: section.key=value ...': a setting of its own. May be repeated.", show_default=False),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="section.key=a,b,c: a setting for each value. Repeated: for all combinations."),
    ] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value for all runs.")] = None,
    seed_key: Annotated[list[str] | None, typer.Option(help="Keys set to the seed. Default: grpo.seed")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="To compare. Default: held-out pass rates")] = None,
    at: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Answers generated at which runs are compared. Default: the most that all have"),
    ] = None,
    reach: Annotated[
        list[str] | None, typer.Option(help="METRIC=VALUE: how many answers it takes to get there.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Setting that others are compared with. Default: the first")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    devices: Annotated[
        str | None, typer.Option(help="CUDA devices dealt out to the runs, such as 0,1,2,3", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs, the table and the picture.")] = Path("runs/sweep"),
) -> None:
    """Several recipes or overrides over several seeds, with one table and picture. Run again to resume."""
    quiet_libraries()
    from exgrpo_megatron.sweep_command import SweepRequest, sweep_and_report  # noqa: PLC0415

    code = sweep_and_report(
        SweepRequest(
            recipes=recipes,
            out=out,
            seeds=seeds,
            seed_keys=seed_key or ("grpo.seed",),
            arms=arm or (),
            vary=vary or (),
            overrides=override or (),
            metrics=metric or (),
            at=at or (),
            reach=reach or (),
            baseline=baseline,
            jobs=jobs,
            devices=devices,
        )
    )
    raise typer.Exit(code)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run (logger.log_dir).", show_default=False)],
    html: Annotated[
        bool, typer.Option("--html", help="One HTML file instead, to be opened from disk: charts, every question.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --html: the file. Default: <run>/report.html", show_default=False)
    ] = None,
    max_answer_texts: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --html: so many replayed answers have their text. Default: 5000", show_default=False
        ),
    ] = None,
) -> None:
    """Draw the dashboard of a run, finished or not; with --html, a page with its questions and answers."""
    quiet_libraries()
    console = Console()
    if html:
        from exgrpo_megatron.report.html_page import MAX_ANSWER_TEXTS, write_page  # noqa: PLC0415

        path, notes = write_page(run, out, MAX_ANSWER_TEXTS if max_answer_texts is None else max_answer_texts)
        for note in notes:
            console.print(note, markup=False, soft_wrap=True, highlight=False)
        console.print(f"report: {path}", markup=False, soft_wrap=True, highlight=False)
        return
    if out is not None or max_answer_texts is not None:
        raise ConfigError("--out and --max-answer-texts are for --html")
    from exgrpo_megatron.report.dashboard import write_dashboard  # noqa: PLC0415

    console.print(f"dashboard: {write_dashboard(run)}", soft_wrap=True, highlight=False)


def debug(
    folder: Annotated[Path, typer.Argument(help="Of a bad step: <logger.log_dir>/debug/step_N.", show_default=False)],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder: compute it again from the tokens with these weights.", show_default=False
        ),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="The same with the weights that were kept with it (debug.weights).")
    ] = False,
) -> None:
    """What `exgrpo train --debug` kept of a bad step, with its loss computed again from what was kept."""
    quiet_libraries()
    from exgrpo_megatron.debug_command import replay_bad_step, replay_recipe, show_bad_step  # noqa: PLC0415

    show_bad_step(folder)
    if model is None and not replay:
        return
    if model is None and not (folder / "weights").is_dir():
        raise ConfigError(f"--replay: no weights were kept in {folder} (debug.weights = false): give --model")
    config = replay_recipe(folder)
    with process_group(config) as comm:
        replay_bad_step(folder, model, config, comm)
