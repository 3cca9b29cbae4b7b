"""The `exgrpo` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron import (
    __version__,
    data_command,
    experience_command,
    launching_commands,
    model_commands,
    planning_commands,
    result_commands,
)
from exgrpo_megatron.arguments import OverridesArgument, RecipeArgument
from exgrpo_megatron.config import Config
from exgrpo_megatron.evaluation_request import EvalRequest, QuestionsOf
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.places import LOADING, READING
from exgrpo_megatron.process import (
    STOPPED_AT_ONCE,
    command,
    launched_rank,
    let_rank_0_speak,
    process_group,
    quiet_libraries,
    reported_errors,
    say,
    whole_run,
)
from exgrpo_megatron.recipe import dump_recipe, load_recipe, load_with_report

# Everything that needs torch is imported inside the commands: --help, show and options answer at once.

app = typer.Typer(
    help="ExGRPO on Megatron-Core: GRPO with verifiable rewards and experience replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_command.app, name="data")
app.add_typer(experience_command.app, name="experience")


_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; where it is defined depends on the version of typer."""


def main(args: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, or stopped by a signal and saved; 2 something the user must change; 130 stopped at once.
    With `args`, the caller goes on after it, with the handler of SIGTERM it had."""
    with reported_errors(last=args is None):
        try:
            code = app(args, prog_name="exgrpo", standalone_mode=False)
        except _UsageError as error:
            let_rank_0_speak()
            error.show()
            code = error.exit_code
        except (KeyboardInterrupt, typer.Abort):
            code = STOPPED_AT_ONCE
        if code == STOPPED_AT_ONCE and launched_rank() == 0:  # some versions of typer make it a code, silently
            sys.stderr.write("error: stopped by Ctrl-C\n")
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
def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Keep the batch of every bad step (debug.enabled=true).")
    ] = False,
) -> None:
    """Train a recipe: warm start if it asks for one, ExGRPO, evaluation and export. Run again to resume."""
    config, of_nemo_rl = load_with_report(recipe, [*(overrides or []), *(["debug.enabled=true"] if debug else [])])
    with whole_run(config) as (comm, stop):
        from exgrpo_megatron.train_command import keep_report, train_and_report  # noqa: PLC0415

        keep_report(config, of_nemo_rl, comm)
        train_and_report(config, comm, stop)


@app.command()
def sft(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Supervised fine-tuning of a recipe's model (its `sft:` section), exported to <logger.log_dir>/sft/hf."""
    config = load_recipe(recipe, overrides or [])
    with whole_run(config) as (comm, stop):
        from exgrpo_megatron import run_inputs, supervised  # noqa: PLC0415
        from exgrpo_megatron.comm import together  # noqa: PLC0415
        from exgrpo_megatron.loggers.choice import check_loggers  # noqa: PLC0415
        from exgrpo_megatron.run_folder import RECIPE_FILE  # noqa: PLC0415
        from exgrpo_megatron.train_command import reporter_of  # noqa: PLC0415

        with together(comm):
            check_loggers(config.logger)
        with comm.places.inside(READING):
            inputs = run_inputs.load_inputs(config, comm)
        target = Path(config.logger.log_dir) / "sft" / "hf"
        with reporter_of(comm, config.sft.max_num_steps, "sft") as reporter:
            done = supervised.supervised_run(config, inputs, target, comm, reporter, stop)
        if done is None:
            say(comm, "stopped before the end: nothing was exported, and the same command goes on")
            return
        if comm.is_main:
            used = done.with_name(RECIPE_FILE)
            replace_text(used, dump_recipe(config))
            say(comm, f"exported to {done}\nnext: {command('eval', used, '--checkpoint', done)}")


@app.command(name="eval")
def evaluate(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run's checkpoint folder or a Hugging Face folder.", show_default=False)
    ] = None,
    questions: Annotated[
        QuestionsOf | None,
        typer.Option(
            help="sets: those of eval.sets. train: to choose questions by pass rate, data.train.pass_rates_path. "
            "Default: sets where the recipe has some, else validation",
            show_default=False,
        ),
    ] = None,
    entropy: Annotated[
        bool,
        typer.Option("--entropy", help="Also the token entropy of right and wrong answers, by band of pass rates."),
    ] = False,
) -> None:
    """Pass rates of a checkpoint (default: the newest of the recipe's run), over all questions and of each. On sets,
    run it again to resume."""
    config = load_recipe(recipe, overrides or [])
    questions = questions or (QuestionsOf.sets if config.eval.sets else QuestionsOf.validation)
    if questions is QuestionsOf.sets:
        _evaluate_sets(config, checkpoint, entropy)
        return
    with process_group(config) as comm:
        from exgrpo_megatron import checkpoint_evaluation, run_inputs  # noqa: PLC0415
        from exgrpo_megatron.report.tables import evaluation_table  # noqa: PLC0415

        found = checkpoint_evaluation.find_checkpoint(config, checkpoint, comm, questions)
        request = EvalRequest(found, questions, entropy)
        with comm.places.inside(READING):
            inputs = run_inputs.load_inputs(config, comm)
        evaluation = checkpoint_evaluation.evaluate_checkpoint(config, inputs, request, comm)
        if comm.is_main:
            written = checkpoint_evaluation.write_evaluation(config, evaluation, request)
            asked = inputs.train.questions if questions is QuestionsOf.train else inputs.held_out
            console, metrics = Console(), evaluation.metrics
            console.print(evaluation_table(metrics, len(asked), config.eval.temperature, questions))
            length, cut_off = metrics["validation/response_length"], metrics["validation/truncated"]
            say(
                comm, f"\nsampled answers: {length:.1f} tokens on average; cut off at the longest length: {cut_off:.0f}"
            )
            if written.report is not None:
                console.print("", written.report.table(), sep="\n")
            say(comm, written.describe(found))


def _evaluate_sets(config: Config, checkpoint: Path | None, entropy: bool) -> None:
    with process_group(config, advice="the same command goes on after the answers that are written") as comm:
        from exgrpo_megatron import checkpoint_evaluation  # noqa: PLC0415
        from exgrpo_megatron.set_evaluation.run import check_sets, evaluate_sets  # noqa: PLC0415

        check_sets(config, entropy=entropy)
        found = checkpoint_evaluation.find_checkpoint(config, checkpoint, comm, QuestionsOf.sets)
        written = evaluate_sets(config, EvalRequest(found, QuestionsOf.sets), comm, partial(say, comm))
        say(comm, written.describe())


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
    config = load_recipe(recipe, overrides or [])
    with process_group(config) as comm:
        from exgrpo_megatron import build, run_inputs  # noqa: PLC0415
        from exgrpo_megatron.prefill import check_prefill_target, record_solutions  # noqa: PLC0415

        target = check_prefill_target(config)
        with comm.places.inside(READING):
            inputs = run_inputs.load_inputs(config, comm)
        with comm.places.inside(LOADING):
            actor = build.build_rl_actor(config, inputs.model_dir, comm)
            parts = build.build_parts(config, inputs, actor, comm)
        try:
            with comm.places.inside("recording the solutions"):
                report = record_solutions(parts, ending or ["\\boxed{{answer}}"])
        finally:
            parts.verifier.close()
        parts.experience.save(target)
        say(comm, f"{report.describe()}\nwritten to {target}")


@app.command()
def doctor() -> None:
    """What is installed, what each missing extra would give, and what will be used."""
    quiet_libraries()
    from exgrpo_megatron.doctor import print_report  # noqa: PLC0415

    print_report()


for other in (
    planning_commands.show,
    planning_commands.options,
    planning_commands.simulate,
    launching_commands.launch,
    model_commands.convert,
    model_commands.export,
    result_commands.report,
    result_commands.sweep,
    result_commands.debug,
):
    app.command()(other)
