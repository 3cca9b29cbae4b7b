"""The `exgrpo` command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from exgrpo_megatron import __version__, experience_command
from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.evaluation_request import EvalRequest, QuestionsOf
from exgrpo_megatron.export_request import ExportCheck, ExportDtype
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.plan_command import planned_processes, show_plan
from exgrpo_megatron.process import (
    STOPPED_AT_ONCE,
    command,
    launched_rank,
    let_rank_0_speak,
    process_group,
    quiet_libraries,
    reported_errors,
    say,
)
from exgrpo_megatron.recipe import dump_recipe, load_recipe
from exgrpo_megatron.recipe import options as recipe_options
from exgrpo_megatron.stop import StopSignal

if TYPE_CHECKING:
    from exgrpo_megatron.comm import Communicator

# Everything that needs torch is imported inside the commands: --help, show and options answer at once.

app = typer.Typer(
    help="ExGRPO on Megatron-Core: GRPO with verifiable rewards and experience replay.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(experience_command.app, name="experience")


class TargetFormat(StrEnum):
    """What `exgrpo convert` writes."""

    hf = "hf"
    torch_dist = "torch_dist"
    nemo2 = "nemo2"


RecipeArgument = Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)]
OverridesArgument = Annotated[list[str] | None, typer.Argument(help="section.key=value ...", show_default=False)]

_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; where it is defined depends on the version of typer."""


def main(args: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, or stopped by a signal and saved; 2 something the user must change; 130 stopped at once."""
    with reported_errors():
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
def train(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Train a recipe: warm start if it asks for one, ExGRPO, evaluation and export. Run again to resume."""
    config = load_recipe(recipe, overrides or [])
    with _run(config) as (comm, stop):
        from exgrpo_megatron.train_command import train_and_report  # noqa: PLC0415

        train_and_report(config, comm, stop)


@app.command()
def sft(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Supervised fine-tuning of a recipe's model (its `sft:` section), exported to <logger.log_dir>/sft/hf."""
    config = load_recipe(recipe, overrides or [])
    with _run(config) as (comm, stop):
        from exgrpo_megatron import build, session  # noqa: PLC0415
        from exgrpo_megatron.run_folder import RECIPE_FILE  # noqa: PLC0415
        from exgrpo_megatron.train_command import reporter_of  # noqa: PLC0415

        inputs = build.load_inputs(config, comm)
        target = Path(config.logger.log_dir) / "sft" / "hf"
        with reporter_of(comm, config.sft.max_num_steps, "sft") as reporter:
            done = session.supervised_run(config, inputs, target, comm, reporter, stop)
        if done is None:
            say(comm, "stopped before the end: nothing was exported, and the same command begins again")
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
        QuestionsOf, typer.Option(help="train: to choose questions by pass rate, data.train.pass_rates_path.")
    ] = QuestionsOf.validation,
    entropy: Annotated[
        bool,
        typer.Option("--entropy", help="Also the token entropy of right and wrong answers, by band of pass rates."),
    ] = False,
) -> None:
    """Pass rates of a checkpoint (default: the newest of the recipe's run), over all questions and of each."""
    config = load_recipe(recipe, overrides or [])
    with process_group(config) as comm:
        from exgrpo_megatron import build, checkpoint_evaluation  # noqa: PLC0415
        from exgrpo_megatron.report.tables import evaluation_table  # noqa: PLC0415

        found = checkpoint_evaluation.find_checkpoint(config, checkpoint, comm, questions)
        request = EvalRequest(found, questions, entropy)
        inputs = build.load_inputs(config, comm)
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
        from exgrpo_megatron import build  # noqa: PLC0415
        from exgrpo_megatron.prefill import check_prefill_target, record_solutions  # noqa: PLC0415

        target = check_prefill_target(config)
        inputs = build.load_inputs(config, comm)
        actor = build.build_rl_actor(config, inputs.model_dir, comm)
        parts = build.build_parts(config, inputs, actor, comm)
        try:
            report = record_solutions(parts, ending or ["\\boxed{{answer}}"])
        finally:
            parts.verifier.close()
        parts.experience.save(target)
        say(comm, f"{report.describe()}\nwritten to {target}")


@app.command()
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

    config = load_recipe(recipe, overrides or [])
    processes = planned_processes(config.cluster, world_size)
    console = Console()
    console.print(dump_recipe(config), markup=False, highlight=False, soft_wrap=True)
    data_parallel_size = max(1, (processes or 1) // config.policy.megatron_cfg.model_parallel_size)
    console.print(numbers_table(config, data_parallel_size), "", variant_table(config), sep="\n")
    if processes is not None:
        show_plan(config, processes, gpu_memory_gib, console)


@app.command()
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


@app.command()
def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Machines. Default: cluster.num_nodes; 1 where that is null", show_default=False),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: cluster.gpus_per_node; 8 where that is null", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(show_default=False)] = None,
    account: Annotated[str | None, typer.Option(show_default=False)] = None,
    time: Annotated[str | None, typer.Option(help="Limit, as sbatch takes it.", show_default=False)] = None,
    stop_before_s: Annotated[
        int, typer.Option(help="The run saves and stops so long before the limit: longer than a step.")
    ] = 600,
    job_name: Annotated[str | None, typer.Option(help="Default: that of the recipe file", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write. Default: standard output", show_default=False)
    ] = None,
) -> None:
    """A batch file that trains a recipe on several machines under Slurm. Nothing is submitted."""
    from exgrpo_megatron.launch_command import SlurmJob, batch_file, check_job  # noqa: PLC0415

    config = load_recipe(recipe, overrides or [])
    job = SlurmJob(
        nodes=nodes or config.cluster.num_nodes or 1,
        gpus_per_node=gpus_per_node or config.cluster.gpus_per_node or 8,
        name=job_name or recipe.stem,
        partition=partition,
        account=account,
        time=time,
        stop_before_s=stop_before_s,
    )
    check_job(config, job)
    text = batch_file(job, recipe, overrides or [])
    if output is None:
        sys.stdout.write(text)
        return
    replace_text(output, text)
    Console().print(
        f"written to {output}; submit it with: sbatch {output}", markup=False, highlight=False, soft_wrap=True
    )


@app.command()
def convert(
    context: typer.Context,
    src: Annotated[Path, typer.Argument(help="Checkpoint; its format is told by what is in it.", show_default=False)],
    dst: Annotated[Path, typer.Argument(help="Folder to write; with --check, to compare.", show_default=False)],
    to: Annotated[TargetFormat, typer.Option(help="Format to write.")] = TargetFormat.hf,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder of a Megatron checkpoint's model.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: as in the source", show_default=False)
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 5GB or 512MiB.")] = "5GB",
    make_vocab_size_divisible_by: Annotated[
        int,
        typer.Option(min=1, help="Megatron formats: pad the vocabulary to this times --tensor-parallel."),
    ] = 128,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks to pad for; any number loads what is written.")
    ] = 1,
    unpickle: Annotated[
        bool,
        typer.Option("--unpickle", help="Allow pickles that can run code (mp_rank_XX files)."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier conversion at DST.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing: compare SRC and DST, of any formats. Exit code 1 if not the same."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --check: everything found, as JSON.")] = False,
) -> None:
    """Convert weights between Hugging Face, Megatron and NeMo 2 formats, without a GPU; or compare two checkpoints."""
    quiet_libraries()
    if check:
        from exgrpo_megatron.check_command import check_and_report, refuse_options  # noqa: PLC0415

        refuse_options(context, {"src", "dst", "config", "unpickle", "check", "json"})
        raise typer.Exit(0 if check_and_report(src, dst, config=config, unpickle=unpickle, as_json=json) else 1)
    if json:
        raise ConfigError("--json is for --check")
    from exgrpo_megatron.convert_command import convert_and_report, make_target  # noqa: PLC0415

    target = make_target(to.value, dst, dtype, max_shard_size, make_vocab_size_divisible_by, tensor_parallel, overwrite)
    convert_and_report(src, target, config=config, unpickle=unpickle)


@app.command()
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


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run (logger.log_dir).", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of the checkpoint. Default: the newest one's", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint best in checkpointing.metric_name.")] = False,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Of the tensors. Default: policy.precision", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: <run>/hf-step_N[-dtype]", show_default=False)
    ] = None,
    verify: Annotated[
        ExportCheck,
        typer.Option(help="logits: run the model on both sides and compare tensors; tensors: compare these alone."),
    ] = ExportCheck.logits,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the base model. Default: policy.model_name", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that stands at --out.")] = False,
) -> None:
    """A run's checkpoint as a Hugging Face folder with a model card, checked before it is put there. Uses no GPU."""
    from exgrpo_megatron.export_command import ExportRequest, export_run  # noqa: PLC0415

    export_run(ExportRequest(run, step, best, dtype, out, verify, model, overwrite))


@app.command()
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


@app.command()
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


@app.command()
def doctor() -> None:
    """What is installed, what each missing extra would give, and what will be used."""
    quiet_libraries()
    from exgrpo_megatron.doctor import print_report  # noqa: PLC0415

    print_report()


@contextmanager
def _run(config: Config) -> Iterator[tuple[Communicator, StopSignal]]:
    """The processes of a command that writes into the run's folder, which is theirs alone, and stops on a signal."""
    with process_group(config) as comm:
        from exgrpo_megatron.run_folder import locked_folder  # noqa: PLC0415

        with locked_folder(config, comm), StopSignal(announce=comm.is_main).installed() as stop:
            yield comm, stop
