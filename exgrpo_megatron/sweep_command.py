"""`exgrpo sweep`: several settings over several seeds on one machine, and one table and picture of them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.files import writable_folder
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.plan_command import planned_processes
from exgrpo_megatron.process import launched_processes
from exgrpo_megatron.report.console import format_duration
from exgrpo_megatron.report.seeds import run_curve
from exgrpo_megatron.report.summary import never_replayed
from exgrpo_megatron.run_folder import METRICS_FILE
from exgrpo_megatron.stop import StopSignal
from exgrpo_megatron.sweep.arms import Arm, Run, make_arms, make_runs, parse_axis, parse_seeds
from exgrpo_megatron.sweep.comparison import Curves, Level, columns_of, known_metric, parse_level
from exgrpo_megatron.sweep.processes import Ended, last_words, run_all, train_command
from exgrpo_megatron.sweep.state import RunState, SweepState, is_whole
from exgrpo_megatron.sweep.tables import Findings, Missing, NeverReplayed, markdown, write_findings

SOME_FAILED = 1
"""Exit code where a run failed and the others are done."""

HELD_OUT = {"validation/pass_rate_t1": "sampled", "validation/pass_rate_greedy": "greedy"}
"""Metrics compared where none is named and all arms measure them."""


@dataclass(frozen=True)
class SweepRequest:
    """What the command line says; see `exgrpo sweep --help`."""

    recipes: Sequence[str]
    out: Path
    seeds: str = "1-3"
    seed_keys: Sequence[str] = ("grpo.seed",)
    arms: Sequence[str] = ()
    vary: Sequence[str] = ()
    overrides: Sequence[str] = ()
    metrics: Sequence[str] = ()
    at: Sequence[int] = ()
    reach: Sequence[str] = ()
    baseline: str | None = None
    jobs: int = 1
    devices: str | None = None


def sweep_and_report(request: SweepRequest) -> int:
    """Do the runs that are not done yet, then compare all that are; the exit code.

    Raises:
        ConfigError: something on the command line or in a recipe is refused; nothing has been started then.
    """
    plan = _Plan(request)
    with _locked(request.out) as lock:
        state = SweepState(request.out, plan.runs)
        if _run_missing(plan, state, lock):
            _say("stopped: the same command goes on")
        if any(state[run].status in ("finished", "failed") for run in plan.runs):
            _compare(plan, state)
    return SOME_FAILED if any(state[run].status == "failed" for run in plan.runs) else 0


class _Plan:
    """The request, checked."""

    def __init__(self, request: SweepRequest) -> None:
        if launched_processes() > 1:
            raise ConfigError("exgrpo sweep starts its own processes: run it without torchrun")
        self.request = request
        arms = make_arms(request.recipes, request.arms, [parse_axis(text) for text in request.vary], request.overrides)
        self.arms: list[Arm] = arms
        self.seeds = parse_seeds(request.seeds)
        self.runs: list[Run] = make_runs(arms, self.seeds, request.seed_keys, request.out)
        for run in self.runs:
            _check_one_process(run)
        self.levels: list[Level] = [parse_level(text) for text in request.reach]
        named = [known_metric(name, f"--metric {name}") for name in request.metrics]
        self.metrics = named or _default_metrics([run.config for run in self.runs])
        self.curves_of = list(dict.fromkeys([*self.metrics, *(level.metric for level in self.levels)]))
        self.baseline = request.baseline or arms[0].name
        if self.baseline not in [arm.name for arm in arms]:
            raise ConfigError(
                f"--baseline {self.baseline!r}: no arm has this name; they are {', '.join(arm.name for arm in arms)}"
            )
        self.devices = request.devices.split(",") if request.devices else []


def _default_metrics(configs: Sequence[Config]) -> list[str]:
    if not all(config.data.validation for config in configs):
        return ["reward/pass_rate_fresh"]
    greedy = all(config.eval.greedy for config in configs)
    return [name for name, how in HELD_OUT.items() if how == "sampled" or greedy]


def _check_one_process(run: Run) -> None:
    processes = planned_processes(run.config.cluster, None) or 1
    layout = run.config.policy.megatron_cfg.model_parallel_size
    if processes > 1 or layout > 1:
        raise ConfigError(
            f"arm {run.arm.name!r}: a sweep starts one process a run, but the recipe is for {max(processes, layout)}"
        )


def _run_missing(plan: _Plan, state: SweepState, lock: int) -> bool:
    """Returns whether a signal stopped it. The runs hold the lock too: they save where this process is killed."""
    missing = [run for run in plan.runs if not (state[run].status == "finished" and is_whole(run))]
    total = len(plan.runs)
    _say(f"{len(plan.arms)} arms x {len(plan.seeds)} seeds: {total} runs, {total - len(missing)} done before")
    done = total - len(missing)

    def began(run: Run) -> None:
        state.set(run, RunState("running"))
        _say(f"{run.name}: begins; {run.log}")

    def ended(run: Run, how: Ended) -> None:
        nonlocal done
        state.set(run, _state_after(run, how))
        done += state[run].status == "finished"
        told = f": {state[run].message}" if state[run].message else ""
        after = format_duration(how.seconds)
        _say(f"{run.name}: {state[run].status} after {after}{told} ({done} of {total} done)")

    with StopSignal(announce=True).installed() as stop:
        run_all(missing, plan.request.jobs, plan.devices, stop, train_command, began=began, ended=ended, held=[lock])
    return stop.requested


def _state_after(run: Run, how: Ended) -> RunState:
    if how.exit_code == 0 and is_whole(run):
        return RunState("finished", 0, how.seconds)
    if how.exit_code == 0:
        return RunState("stopped", 0, how.seconds, "the same command goes on")
    words = last_words(run.log)
    return RunState("failed", how.exit_code, how.seconds, f"exit code {how.exit_code}{f': {words}' if words else ''}")


def _compare(plan: _Plan, state: SweepState) -> None:
    finished = [run for run in plan.runs if state[run].status == "finished"]
    records = {run.folder: read_metrics(run.folder / METRICS_FILE) for run in finished}
    curves: Curves = {
        metric: {
            arm.name: {run.seed: run_curve(records[run.folder], metric) for run in finished if run.arm == arm}
            for arm in plan.arms
        }
        for metric in plan.curves_of
    }
    arms = [arm.name for arm in plan.arms]
    shown = {metric: curves[metric] for metric in plan.metrics}
    columns = columns_of(shown, curves, arms, [float(at) for at in plan.request.at], plan.levels, plan.baseline)
    findings = Findings(
        arms=arms,
        baseline=plan.baseline,
        num_planned=len(plan.seeds),
        columns=columns,
        missing=[_missing(run, state[run]) for run in plan.runs if run not in finished],
        never_replayed=[
            NeverReplayed(run.arm.name, run.seed, words)
            for run in finished
            if (words := never_replayed(records[run.folder])) is not None
        ],
        seconds={
            arm.name: [_training_seconds(records[run.folder]) for run in finished if run.arm == arm]
            for arm in plan.arms
        },
    )
    written = write_findings(plan.request.out, findings, curves)
    _say("", markdown(findings), *(f"written to {path}" for path in written))


def _training_seconds(records: Sequence[dict[str, float]]) -> float:
    """Of the steps alone, over all processes that the run took; evaluations and checkpoints are not among them."""
    return sum(record.get("time/step_s", 0.0) for record in records)


def _say(*lines: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(*lines, sep="\n")


def _missing(run: Run, state: RunState) -> Missing:
    return Missing(run.arm.name, run.seed, state.status, state.message, str(run.log))


@contextmanager
def _locked(out: Path) -> Iterator[int]:
    """The lock's file descriptor. Two sweeps would run the same runs; raises ConfigError."""
    writable_folder(out, "--out")
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}: another sweep is going on there, or runs of one that was killed are saving; wait for "
                f"them, or choose another"
            ) from None
        yield lock.fileno()
