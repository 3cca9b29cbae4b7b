"""`exgrpo simulate`: options, progress, and what a simulated run shows at its end."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from exgrpo_megatron.algorithm.chance import stable_seed
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.sources import source_rows
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.files import writable_folder
from exgrpo_megatron.simulation.learner import Growth
from exgrpo_megatron.simulation.outcome import buckets_table, steps_table, summary, summary_table, write_outcome
from exgrpo_megatron.simulation.rates import Rates, find_rates, is_distribution
from exgrpo_megatron.simulation.run import Assumptions, Simulated, not_simulated, simulate

_HEADER_BYTES, _TOKEN_BYTES = 60, 4.0
"""Of a stored answer on disk: measured in benchmarks/experience.py, 3 to 5 bytes a token."""
_SHOWN_WARNINGS = 3


@dataclass(frozen=True)
class SimulateRequest:
    """The options of the command; None: as the source of the pass rates or the recipe says."""

    rates: str
    growth: str | None
    questions: int | None
    distinct: int | None
    answer_tokens: int | None
    out: Path | None
    as_json: bool


def simulate_and_report(config: Config, request: SimulateRequest) -> None:
    """Simulate, print the tables (or JSON), and write the files that were asked for.

    Raises:
        ConfigError, DataError: an option, a file of pass rates, or fewer questions than a step needs.
    """
    if request.out is not None:
        writable_folder(request.out, "--out")
        _refuse_a_real_run(request.out)
    rates = _rates(config, request)
    if len(rates.values) < config.grpo.num_prompts_per_step:
        raise ConfigError(
            f"grpo.num_prompts_per_step = {config.grpo.num_prompts_per_step} is more than the {len(rates.values)} "
            f"questions of --rates {request.rates}; give more with --questions"
        )
    assumptions = _assumptions(config, request, rates)
    run = _with_progress(config, rates, assumptions, request)
    found = summary(run)
    if request.out is not None:
        write_outcome(request.out, run, found, assumptions, rates.words)
    if request.as_json:
        sys.stdout.write(json.dumps({"summary": found, "steps": run.records}) + "\n")
        return
    console = Console()
    console.print(steps_table(run), "", buckets_table(run), "", summary_table(found), "", sep="\n")
    for line in (*not_simulated(config), *_first_warnings(run.warnings)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"pass rates: {rates.words}; growth in logits: {assumptions.growth}", soft_wrap=True)
    if request.out is not None:
        console.print(f"written to {request.out}: simulation.json, .csv and .png, metrics and history", soft_wrap=True)


def _rates(config: Config, request: SimulateRequest) -> Rates:
    rng = np.random.default_rng(stable_seed(config.grpo.seed, "pass rates"))
    wanted = request.questions
    if wanted is None and is_distribution(request.rates):
        wanted = _questions_of_recipe(config)
    rates = find_rates(request.rates, wanted or 0, rng)
    return rates.resized(wanted, rng) if wanted else rates


def _questions_of_recipe(config: Config) -> int:
    train = config.data.train
    if not train.has_rows:
        size = train.generator_size
    elif train.path is None or Path(train.path).is_file():
        size = sum(1 for _ in islice(source_rows(train, [train.question_key], "data.train"), train.max_questions))
    else:
        raise ConfigError(
            f"data.train.path = {train.path!r} is not there, so the number of questions is not known: give --questions"
        )
    return min(size, train.max_questions) if train.max_questions is not None else size


def _assumptions(config: Config, request: SimulateRequest, rates: Rates) -> Assumptions:
    """A run's log, where rates come from one, leads the growth, unless `--growth` says how it goes."""
    still = Growth(0.0, 0.0, 0.0) if rates.curve else Growth()
    tokens = request.answer_tokens or config.policy.generation.max_new_tokens // 2
    estimated = _HEADER_BYTES + _TOKEN_BYTES * tokens
    logged = rates.answer_bytes if request.answer_tokens is None else None
    return Assumptions(
        growth=still if request.growth is None else Growth.parse(request.growth),
        distinct=request.distinct or rates.distinct,
        answer_bytes=logged or estimated,
    )


def _with_progress(config: Config, rates: Rates, assumptions: Assumptions, request: SimulateRequest) -> Simulated:
    console = Console(stderr=True)
    steps = iter(track(range(config.grpo.max_num_steps), "simulating", console=console, transient=True,
                       disable=request.as_json or not console.is_terminal))  # fmt: skip
    next(steps)
    run = simulate(
        config, rates, assumptions, after_step=lambda _: next(steps, None), keep_events=request.out is not None
    )
    for _ in steps:
        pass
    return run


def _first_warnings(warnings: list[str]) -> list[str]:
    more = len(warnings) - _SHOWN_WARNINGS
    return [*warnings[:_SHOWN_WARNINGS], *([f"{more} more warnings of the trainer"] if more > 0 else [])]


def _refuse_a_real_run(folder: Path) -> None:
    if (folder / "recipe.yaml").exists() and not (folder / "simulation.json").exists():
        raise ConfigError(f"--out {folder}: a run's folder; choose another, its metrics would be replaced")
