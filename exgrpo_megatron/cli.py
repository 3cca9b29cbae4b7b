"""The `exgrpo` command."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from exgrpo_megatron import __version__
from exgrpo_megatron.config import VARIANTS, Config
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.recipe import derived_table, dump_recipe, load_recipe
from exgrpo_megatron.recipe import options as recipe_options

app = typer.Typer(
    help="ExGRPO on Megatron-Core: GRPO with verifiable rewards and experience replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]


def main() -> None:
    """Entry point: user errors become one message and exit code 2."""
    try:
        app()
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
        where = f" ({error.filename})" if error.filename else ""
        _fail(f"{error.strerror}{where}: make room or choose another logger.log_dir; nothing saved before was lost")
    except KeyboardInterrupt:
        _fail("stopped at once; the last checkpoint is as it was", code=130)


@app.command()
def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train a recipe: warm start if it asks for one, ExGRPO, evaluation and export. Run again to resume."""
    config = load_recipe(recipe, overrides or [])
    with _process(config) as comm, _session(config, comm):
        _train(config, comm, recipe)


@app.command()
def sft(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Supervised fine-tuning of a recipe's model (its `sft:` section), exported to <logger.log_dir>/sft/hf."""
    from exgrpo_megatron import build, session  # noqa: PLC0415

    config = load_recipe(recipe, overrides or [])
    with _process(config) as comm, _session(config, comm), session.StopSignal().installed() as stop:
        inputs = build.load_inputs(config, comm)
        target = Path(config.logger.log_dir) / "sft" / "hf"
        with _reporter(comm, config.sft.max_num_steps, "sft") as reporter:
            done = session.supervised_run(config, inputs, target, comm, reporter, stop)
        if comm.rank == 0:
            _console().print(f"exported to {done}" if done else "stopped before the end; nothing was exported")


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run's checkpoint folder or a Hugging Face folder.", show_default=False)
    ] = None,
) -> None:
    """Held-out pass rates of a checkpoint (default: the newest of the recipe's run)."""
    from exgrpo_megatron import build, session  # noqa: PLC0415

    config = load_recipe(recipe, overrides or [])
    with _process(config) as comm:
        inputs = build.load_inputs(config, comm)
        found = checkpoint or session.checkpoint_store(config, comm).latest()
        if found is None:
            raise UserError(f"no checkpoint under {config.logger.log_dir}; train first, or give --checkpoint DIR")
        if not found.is_dir():
            raise UserError(f"--checkpoint {found}: no such folder")
        evaluation = session.evaluate_checkpoint(config, inputs, found, comm)
        if comm.rank == 0:
            path = Path(config.logger.log_dir) / "eval" / f"{found.name}.json"
            about = {"checkpoint": str(found), "version": __version__, "eval": config.eval.model_dump(mode="json")}
            session.write_evaluation(evaluation, path, about)
            _print_metrics(evaluation.metrics)
            _console().print(f"written to {path}")


@app.command()
def prefill(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    ending: Annotated[
        list[str] | None,
        typer.Option(
            help="Closes a solution that has no box; {answer} is the gold answer. Given several times, a solution is "
            "stored with each. Default: \\boxed{{answer}}",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Experience to begin with (experience.prefill_path), made from the worked solutions in data.train."""
    from exgrpo_megatron import build  # noqa: PLC0415
    from exgrpo_megatron.prefill import check_prefill_target, record_solutions  # noqa: PLC0415

    config = load_recipe(recipe, overrides or [])
    with _process(config) as comm:
        target = check_prefill_target(config, comm.size)
        inputs = build.load_inputs(config, comm)
        actor = build.build_rl_actor(config, inputs.model_dir, comm)
        parts = build.build_parts(config, inputs, actor, comm)
        try:
            report = record_solutions(parts, ending or ["\\boxed{{answer}}"])
        finally:
            parts.verifier.close()
        parts.experience.save(target)
        _say(comm, f"{report.describe()}\nwritten to {target}")


@app.command()
def show(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """The resolved recipe, what its numbers mean, and the variant's switches."""
    config = load_recipe(recipe, overrides or [])
    console = _console()
    console.print(dump_recipe(config), markup=False, highlight=False, soft_wrap=True)
    console.print(_two_columns("What the numbers mean", derived_table(config)))
    console.print(_variant_table(config))


@app.command()
def options() -> None:
    """Every recipe key with its default, unit and meaning."""
    table = Table("key", "default", "unit", "meaning", title="Recipe keys")
    for option in recipe_options():
        table.add_row(option.name, option.default, option.unit, option.meaning)
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    for option in recipe_options():
        unit = f" [{option.unit}]" if option.unit else ""
        console.print(f"{option.name} = {option.default}{unit}: {option.meaning}", markup=False, soft_wrap=True)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder of a run (logger.log_dir).", show_default=False)]) -> None:
    """Draw the dashboard of a run, finished or not."""
    from exgrpo_megatron.report.dashboard import write_dashboard  # noqa: PLC0415

    _console().print(f"dashboard: {write_dashboard(run)}", soft_wrap=True)


@app.command()
def doctor() -> None:
    """What is installed, what each missing extra would give, and what will be used."""
    from exgrpo_megatron.doctor import print_report  # noqa: PLC0415

    print_report()


def _train(config: Config, comm: Any, recipe: Path) -> None:
    from exgrpo_megatron import build, checkpointing, session  # noqa: PLC0415

    started = time.monotonic()
    inputs = build.load_inputs(config, comm)
    if comm.rank == 0:
        _console().print(_two_columns("What the numbers mean", derived_table(config, comm.size)))
        _console().print(_variant_table(config))
    with session.StopSignal().installed() as stop:
        start_from: Path | None = inputs.model_dir
        latest = session.checkpoint_store(config, comm).latest() if config.checkpointing.enabled else None
        if config.sft.warm_start and latest is None:
            with _reporter(comm, config.sft.max_num_steps, "warm start") as reporter:
                start_from = session.warm_start(config, inputs, comm, reporter, stop)
        if start_from is None:
            _say(comm, "stopped during the warm start; the same command begins it again")
            return
        done = checkpointing.read_state(latest)["step"] if latest else 0
        with _reporter(comm, config.grpo.max_num_steps, "train", done) as reporter:
            outcome = session.TrainingRun(config, inputs, start_from, comm, reporter).run(stop)
    if comm.rank == 0:
        _finish(outcome, recipe, config, time.monotonic() - started)


def _finish(outcome: Any, recipe: Path, config: Config, elapsed_s: float) -> None:
    from exgrpo_megatron.metrics import read_metrics  # noqa: PLC0415
    from exgrpo_megatron.report.dashboard import write_dashboard  # noqa: PLC0415
    from exgrpo_megatron.report.summary import run_summary  # noqa: PLC0415

    dashboard = write_dashboard(outcome.log_dir)
    if not outcome.finished:
        _console().print(
            f"stopped after step {outcome.last_step}, saved in {outcome.checkpoint}; the same command goes on"
        )
        return
    records = read_metrics(outcome.log_dir / "metrics.jsonl")
    evaluations = [record for record in records if "validation/pass_rate_t1" in record]
    run_summary(
        before=evaluations[0] if evaluations else {},
        after=evaluations[-1] if evaluations else {},
        paths={
            "dashboard": dashboard,
            "metrics": outcome.log_dir / "metrics.jsonl",
            "checkpoint": outcome.checkpoint,
            "export": outcome.export,
        },
        next_command=f"exgrpo eval {recipe} --checkpoint {outcome.export or outcome.checkpoint}",
        elapsed_s=elapsed_s,
        temperature=config.eval.temperature,
    )


@contextmanager
def _process(config: Config) -> Iterator[Any]:
    """Process groups of this process, closed at the end."""
    _quiet()
    from exgrpo_megatron.policy.distributed import initialize  # noqa: PLC0415

    comm = initialize(config.policy, config.cluster, config.grpo.seed)
    try:
        yield comm
    finally:
        comm.shutdown()


@contextmanager
def _session(config: Config, comm: Any) -> Iterator[None]:
    from exgrpo_megatron import session  # noqa: PLC0415

    with session.run_folder(config, comm):
        yield


@contextmanager
def _reporter(comm: Any, total: int, label: str, done: int = 0) -> Iterator[Any]:
    from exgrpo_megatron.parts import SilentReporter  # noqa: PLC0415
    from exgrpo_megatron.report.console import ProgressReporter  # noqa: PLC0415

    if comm.rank != 0:
        yield SilentReporter()
        return
    with ProgressReporter(total, label, done_steps=done) as reporter:
        yield reporter


def _quiet() -> None:
    """Megatron's import-time warnings say nothing a user can act on; its loggers repeat them."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\..*")


def _say(comm: Any, text: str) -> None:
    if comm.rank == 0:
        _console().print(text, soft_wrap=True)


def _console() -> Console:
    return Console()


def _two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _variant_table(config: Config) -> Table:
    table = Table("switch", "in force", "elsewhere", title=f"Variant: {config.variant}", title_justify="left", box=None)
    for name, value in config.variant_table().items():
        others = {variant: choice for variant, choice in VARIANTS[name].items() if choice != value}
        table.add_row(name, str(value), ", ".join(f"{variant}: {choice}" for variant, choice in others.items()))
    return table


def _print_metrics(metrics: dict[str, float]) -> None:
    for name, value in sorted(metrics.items()):
        _console().print(f"{name} = {value:.4g}", highlight=False)


def _fail(message: str, code: int = 2) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        Console(stderr=True).print(f"[red]error:[/red] {_escaped(message)}", soft_wrap=True, highlight=False)
    sys.stdout.flush()
    raise SystemExit(code)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
