"""`exgrpo train`: from a recipe to the summary of its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from exgrpo_megatron import question_checks, run_inputs, session, supervised
from exgrpo_megatron.comm import Communicator, together
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.embedded_model import is_embedded
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.loggers.choice import check_loggers
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.parts import Reporter, SilentReporter
from exgrpo_megatron.places import READING
from exgrpo_megatron.process import command, say
from exgrpo_megatron.report.console import ProgressReporter, budget_text
from exgrpo_megatron.report.dashboard import write_dashboard
from exgrpo_megatron.report.summary import before_and_after, health_lines, run_summary
from exgrpo_megatron.report.tables import idle_experience, numbers_table, variant_table
from exgrpo_megatron.run_folder import METRICS_FILE, NEMO_RL_FILE, RECIPE_FILE, RunFolder, checkpoint_store
from exgrpo_megatron.run_inputs import Inputs
from exgrpo_megatron.session import RunOutcome
from exgrpo_megatron.stop import StopSignal

STEP_LINE_LEGEND = (
    "a line a step: new pass = correct share of the answers sampled in it (solved questions leave the stream, so it "
    "levels off while the held-out rate rises); retired = questions solved by all their answers; buffer = stored "
    "questions (q) and answers (a); ratio = median (1% - 99%) of new over recorded probability of replayed tokens; "
    "spent = answers sampled so far"
)


def train_and_report(config: Config, comm: Communicator, stop: StopSignal) -> RunOutcome | None:
    """Train to the last step or to a signal, then show what came of it; None where the signal came before the first."""
    started = time.monotonic()
    outcome = _train(config, comm, stop)
    if comm.is_main:
        _finish(outcome, config, time.monotonic() - started)
    return outcome


def keep_report(config: Config, report: str | None, comm: Communicator) -> None:
    """Print what became of a configuration of NeMo-RL, and keep it beside the recipe of the run."""
    if report is not None and comm.is_main:
        say(comm, f"{report}\n")
        replace_text(RunFolder(config).path / NEMO_RL_FILE, f"{report}\n")


@contextmanager
def reporter_of(comm: Communicator, total_steps: int, label: str, done_steps: int = 0) -> Iterator[Reporter]:
    """A `ProgressReporter` on rank 0, and one that says nothing on the others."""
    if not comm.is_main:
        yield SilentReporter()
        return
    with ProgressReporter(total_steps, label, done_steps=done_steps) as reporter:
        yield reporter


def _train(config: Config, comm: Communicator, stop: StopSignal) -> RunOutcome | None:
    """Everything up to the summary; None where a signal stopped the warm start."""
    with together(comm):
        check_loggers(config.logger)
    with comm.places.inside(READING):
        inputs = run_inputs.load_inputs(config, comm)
    _describe(config, inputs, comm)
    finished = session.finished_run(config, inputs, comm)
    if finished:
        return finished
    done = session.steps_done(config, comm)
    start_from = inputs.model_dir if done else _start(config, inputs, comm, stop)
    if start_from is None:
        return None
    if comm.anywhere(stop.requested):
        return RunOutcome(Path(config.logger.log_dir), done, done, False, checkpoint_store(config, comm).latest(), None)
    say(comm, STEP_LINE_LEGEND)
    with reporter_of(comm, config.grpo.max_num_steps, "train", done) as reporter:
        return session.TrainingRun(config, inputs, start_from, comm, reporter).run(stop)


def _describe(config: Config, inputs: Inputs, comm: Communicator) -> None:
    """What is about to be trained, on what, and what was found that should not be there."""
    if comm.is_main:
        Console().print(numbers_table(config, comm.size), "", variant_table(config), "", sep="\n")
        if idle := idle_experience(config):
            say(comm, idle)
    for line in question_checks.describe_questions(inputs):
        say(comm, line)
    for line in question_checks.check_best_checkpoint(config, inputs):
        say(comm, line)
    for path in checkpoint_store(config, comm).not_whole():
        say(comm, f"warning: {path} is no whole checkpoint (it has no state.json), so nothing goes on from it")


def _start(config: Config, inputs: Inputs, comm: Communicator, stop: StopSignal) -> Path | None:
    """Last checks of a new run, and the model folder it begins with; None where a signal stopped the warm start."""
    with together(comm):
        run_inputs.check_prefill(config, RunFolder(config).experience)
        run_inputs.check_init_from(config)
    if config.env.math.check_gold and config.env.reward_function is None:
        with comm.places.inside("grading the gold answers"):
            for line in question_checks.check_gold_answers(config, inputs, comm) if comm.is_main else ():
                say(comm, line)
    if not config.sft.warm_start:
        if is_embedded(config.policy.model_name) and config.policy.init_from is None:
            say(comm, f"warning: {config.policy.model_name} has random weights, and sft.warm_start is false")
        return inputs.model_dir
    with reporter_of(comm, config.sft.max_num_steps, "warm start") as reporter:
        return supervised.warm_start(config, inputs, comm, reporter, stop)


def _finish(outcome: RunOutcome | None, config: Config, elapsed_s: float) -> None:
    if outcome is None or not outcome.finished:
        Console().print(_where_it_stopped(outcome, config), soft_wrap=True, highlight=False)
        return
    trained = outcome.last_step > outcome.first_step
    if not trained:
        done, wanted = outcome.last_step, config.grpo.max_num_steps
        how_far = f"all {done} steps are done" if done == wanted else session.steps_text(done, wanted)
        Console().print(f"nothing was left to train: {how_far}", highlight=False)
    metrics = outcome.log_dir / METRICS_FILE
    records = read_metrics(metrics)
    before, after = before_and_after(records)
    recipe, final = outcome.log_dir / RECIPE_FILE, outcome.export or outcome.checkpoint
    run_summary(
        before=before,
        after=after,
        paths={
            "dashboard": write_dashboard(outcome.log_dir),
            "metrics": metrics,
            "checkpoint": outcome.checkpoint,
            "export": outcome.export,
        },
        # The recipe as it was run: with the overrides of this command line.
        next_command=command("eval", recipe, "--checkpoint", final) if final else command("show", recipe),
        budget=budget_text(records[-1]) if records else "",
        elapsed_s=elapsed_s if trained else None,
        temperature=config.eval.temperature,
        health=health_lines(records),
        tools=outcome.tools,
    )


def _where_it_stopped(outcome: RunOutcome | None, config: Config) -> str:
    if outcome is None and config.checkpointing.enabled:
        return "stopped during the warm start; the same command goes on from there"
    if outcome is None:
        return "stopped during the warm start, of which nothing is kept; the same command begins it again"
    if outcome.last_step == 0:
        return "stopped before the first step; the same command begins again"
    if outcome.checkpoint is None:
        return f"stopped after step {outcome.last_step}; nothing was saved (checkpointing.enabled = false)"
    return f"stopped after step {outcome.last_step}, saved in {outcome.checkpoint}; the same command goes on from there"
