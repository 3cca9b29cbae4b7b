"""The `exgrpo` command."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from exgrpo_megatron import __version__
from exgrpo_megatron.config import Config
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.process import let_rank_0_speak, process_group, program, quiet_libraries, reported_errors
from exgrpo_megatron.recipe import dump_recipe, load_recipe
from exgrpo_megatron.recipe import options as recipe_options
from exgrpo_megatron.stop import StopSignal

if TYPE_CHECKING:
    from exgrpo_megatron.build import Inputs
    from exgrpo_megatron.comm import Communicator
    from exgrpo_megatron.parts import Reporter
    from exgrpo_megatron.session import RunOutcome

# Everything that needs torch is imported inside the commands: --help, show and options answer at once.

app = typer.Typer(
    help="ExGRPO on Megatron-Core: GRPO with verifiable rewards and experience replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]

_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; where it is defined depends on the version of typer."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, or stopped by a signal and saved; 2 something the user must change."""
    with reported_errors():
        try:
            code = app(args, prog_name="exgrpo", standalone_mode=False)
        except _UsageError as error:
            let_rank_0_speak()
            error.show()
            code = error.exit_code
    sys.exit(code or 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"exgrpo-megatron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has printed it


@app.command()
def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train a recipe: warm start if it asks for one, ExGRPO, evaluation and export. Run again to resume."""
    config = load_recipe(recipe, overrides or [])
    with _run(config) as (comm, stop):
        started = time.monotonic()
        outcome = _train(config, comm, stop)
        if comm.rank == 0:
            _finish(outcome, config, time.monotonic() - started)


@app.command()
def sft(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Supervised fine-tuning of a recipe's model (its `sft:` section), exported to <logger.log_dir>/sft/hf."""
    config = load_recipe(recipe, overrides or [])
    with _run(config) as (comm, stop):
        from exgrpo_megatron import build, session  # noqa: PLC0415
        from exgrpo_megatron.run_folder import RECIPE_FILE  # noqa: PLC0415

        inputs = build.load_inputs(config, comm)
        target = Path(config.logger.log_dir) / "sft" / "hf"
        with _reporter(comm, config.sft.max_num_steps, "sft") as reporter:
            done = session.supervised_run(config, inputs, target, comm, reporter, stop)
        if done is None:
            _say(comm, "stopped before the end: nothing was exported, and the same command begins again")
            return
        if comm.rank == 0:
            used = done.with_name(RECIPE_FILE)
            replace_text(used, dump_recipe(config))
            _say(comm, f"exported to {done}\nnext: {program()} eval {_quoted(used)} --checkpoint {_quoted(done)}")


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run's checkpoint folder or a Hugging Face folder.", show_default=False)
    ] = None,
) -> None:
    """Held-out pass rates of a checkpoint (default: the newest of the recipe's run)."""
    config = load_recipe(recipe, overrides or [])
    with process_group(config) as comm:
        from exgrpo_megatron import build, checkpoint_evaluation  # noqa: PLC0415
        from exgrpo_megatron.report.tables import evaluation_table  # noqa: PLC0415

        found = checkpoint_evaluation.find_checkpoint(config, checkpoint, comm)
        inputs = build.load_inputs(config, comm)
        evaluation = checkpoint_evaluation.evaluate_checkpoint(config, inputs, found, comm)
        if comm.rank == 0:
            metrics = evaluation.metrics
            summary, answers = checkpoint_evaluation.write_evaluation(config, evaluation, found)
            Console().print(evaluation_table(metrics, len(inputs.held_out), config.eval.temperature))
            length, cut_off = metrics["validation/response_length"], metrics["validation/truncated"]
            _say(
                comm, f"\nsampled answers: {length:.1f} tokens on average; cut off at the longest length: {cut_off:.0f}"
            )
            _say(comm, f"checkpoint  {found}\nmetrics     {summary}\nanswers     {answers}")


@app.command()
def show(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """The resolved recipe, what its numbers mean, and the variant's switches."""
    from exgrpo_megatron.report.tables import numbers_table, variant_table  # noqa: PLC0415

    config = load_recipe(recipe, overrides or [])
    processes = (config.cluster.num_nodes or 1) * (config.cluster.gpus_per_node or 1)
    console = Console()
    console.print(dump_recipe(config), markup=False, highlight=False, soft_wrap=True)
    console.print(numbers_table(config, processes), "", variant_table(config), sep="\n")


@app.command()
def options() -> None:
    """Every recipe key with its default, unit and meaning."""
    from exgrpo_megatron.report.tables import option_line, options_view  # noqa: PLC0415

    console = Console()
    if console.is_terminal:
        console.print(options_view(recipe_options(), console.width))
        return
    for option in recipe_options():
        console.print(option_line(option), markup=False, highlight=False, soft_wrap=True)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder of a run (logger.log_dir).", show_default=False)]) -> None:
    """Draw the dashboard of a run, finished or not."""
    quiet_libraries()
    from exgrpo_megatron.report.dashboard import write_dashboard  # noqa: PLC0415

    Console().print(f"dashboard: {write_dashboard(run)}", soft_wrap=True, highlight=False)


@app.command()
def doctor() -> None:
    """What is installed, what each missing extra would give, and what will be used."""
    quiet_libraries()
    from exgrpo_megatron.doctor import print_report  # noqa: PLC0415

    print_report()


def _train(config: Config, comm: Communicator, stop: StopSignal) -> RunOutcome | None:
    """Everything up to the summary; None where a signal stopped the warm start."""
    from exgrpo_megatron import build, session  # noqa: PLC0415

    inputs = build.load_inputs(config, comm)
    _describe(config, inputs, comm)
    finished = session.finished_run(config, inputs, comm)
    if finished:
        return finished
    done = session.steps_done(config, comm)
    start_from = inputs.model_dir if done else _start(config, inputs, comm, stop)
    if start_from is None:
        return None
    with _reporter(comm, config.grpo.max_num_steps, "train", done) as reporter:
        return session.TrainingRun(config, inputs, start_from, comm, reporter).run(stop)


def _describe(config: Config, inputs: Inputs, comm: Communicator) -> None:
    """What is about to be trained, on what, and what was found that should not be there."""
    from exgrpo_megatron.question_checks import describe_questions  # noqa: PLC0415
    from exgrpo_megatron.report.tables import numbers_table, variant_table  # noqa: PLC0415
    from exgrpo_megatron.run_folder import checkpoint_store  # noqa: PLC0415

    if comm.rank == 0:
        Console().print(numbers_table(config, comm.size), "", variant_table(config), "", sep="\n")
    for line in describe_questions(inputs):
        _say(comm, line)
    for path in checkpoint_store(config, comm).not_whole():
        _say(comm, f"warning: {path} is no whole checkpoint (it has no state.json), so nothing goes on from it")


def _start(config: Config, inputs: Inputs, comm: Communicator, stop: StopSignal) -> Path | None:
    """Last checks of a new run, and the model folder it begins with; None where a signal stopped the warm start."""
    from exgrpo_megatron import build, question_checks, session  # noqa: PLC0415

    build.check_prefill(config)
    if comm.rank == 0 and config.env.math.check_gold:
        for line in question_checks.check_gold_answers(config, inputs):
            _say(comm, line)
    if not config.sft.warm_start:
        return inputs.model_dir
    with _reporter(comm, config.sft.max_num_steps, "warm start") as reporter:
        return session.warm_start(config, inputs, comm, reporter, stop)


def _finish(outcome: RunOutcome | None, config: Config, elapsed_s: float) -> None:
    from exgrpo_megatron.metrics import read_metrics  # noqa: PLC0415
    from exgrpo_megatron.report.dashboard import write_dashboard  # noqa: PLC0415
    from exgrpo_megatron.report.summary import run_summary  # noqa: PLC0415
    from exgrpo_megatron.run_folder import METRICS_FILE, RECIPE_FILE  # noqa: PLC0415

    if outcome is None or not outcome.finished:
        Console().print(_where_it_stopped(outcome), soft_wrap=True, highlight=False)
        return
    trained = outcome.last_step > outcome.first_step
    if not trained:
        Console().print(f"nothing was left to train: all {outcome.last_step} steps are done", highlight=False)
    metrics = outcome.log_dir / METRICS_FILE
    evaluations = [record for record in read_metrics(metrics) if "validation/pass_rate_t1" in record]
    run_summary(
        before=evaluations[0] if evaluations else {},
        after=evaluations[-1] if evaluations else {},
        paths={
            "dashboard": write_dashboard(outcome.log_dir),
            "metrics": metrics,
            "checkpoint": outcome.checkpoint,
            "export": outcome.export,
        },
        # The recipe as it was run: with the overrides of this command line.
        next_command=f"{program()} eval {_quoted(outcome.log_dir / RECIPE_FILE)}"
        f" --checkpoint {_quoted(outcome.export or outcome.checkpoint)}",
        elapsed_s=elapsed_s if trained else None,
        temperature=config.eval.temperature,
    )


def _where_it_stopped(outcome: RunOutcome | None) -> str:
    if outcome is None:
        return "stopped during the warm start, of which nothing is kept; the same command begins it again"
    if outcome.last_step == 0:
        return "stopped before the first step; the same command begins again"
    if outcome.checkpoint is None:
        return f"stopped after step {outcome.last_step}; nothing was saved (checkpointing.enabled = false)"
    return f"stopped after step {outcome.last_step}, saved in {outcome.checkpoint}; the same command goes on from there"


@contextmanager
def _run(config: Config) -> Iterator[tuple[Communicator, StopSignal]]:
    """The processes of a command that writes into the run's folder, which is theirs alone, and stops on a signal."""
    with process_group(config) as comm:
        from exgrpo_megatron.run_folder import locked_folder  # noqa: PLC0415

        with locked_folder(config, comm), StopSignal(announce=comm.rank == 0).installed() as stop:
            yield comm, stop


@contextmanager
def _reporter(comm: Communicator, total: int, label: str, done: int = 0) -> Iterator[Reporter]:
    from exgrpo_megatron.parts import SilentReporter  # noqa: PLC0415
    from exgrpo_megatron.report.console import ProgressReporter  # noqa: PLC0415

    if comm.rank != 0:
        yield SilentReporter()
        return
    with ProgressReporter(total, label, done_steps=done) as reporter:
        yield reporter


def _quoted(path: Path | None) -> str:
    return shlex.quote(str(path))


def _say(comm: Communicator, text: str) -> None:
    if comm.rank == 0:
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
