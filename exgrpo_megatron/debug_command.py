"""`exgrpo debug`: what was kept of a bad step, and its losses computed again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.comm import Communicator
from exgrpo_megatron.config import Config
from exgrpo_megatron.debug.files import RECIPE, WEIGHTS, BadStep, KeptUpdate, read_bad_step
from exgrpo_megatron.debug.recompute import loss_of
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.types import UpdateResult

_ONE_PROCESS = (
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.pipeline_model_parallel_size=1",
    "policy.megatron_cfg.context_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "cluster.num_nodes=null",
    "cluster.gpus_per_node=null",
)
_ANY_WIDTH = 10_000
MAX_SHOWN = 5
"""Sequences with the largest ratios that are shown of an optimiser step."""
MAX_RANKS_SHOWN = 20


def replay_recipe(folder: Path) -> Config:
    """The recipe of the run, for one process."""
    return load_recipe(folder / RECIPE, _ONE_PROCESS)


def show_bad_step(folder: Path) -> None:
    """Print it; raises DataError for another folder."""
    step, console = read_bad_step(folder), Console()
    console.print(f"step {step.step}: {'; '.join(step.reasons)}", soft_wrap=True, highlight=False, markup=False)
    if step.missing_ranks:
        shown = ", ".join(map(str, step.missing_ranks[:MAX_RANKS_SHOWN]))
        more = len(step.missing_ranks) - MAX_RANKS_SHOWN
        console.print(f"nothing of ranks {shown}{f' and {more} more' if more > 0 else ''}", highlight=False)
    if step.traceback:
        console.print(step.traceback, soft_wrap=True, highlight=False, markup=False)
    _print_updates(console, step, {})
    for number, update in enumerate(step.updates, 1):
        if not update.whole:
            console.print(f"optimiser step {number}: only the sequences of some ranks are there", highlight=False)
        for line in _largest_ratios(update):
            console.print(f"optimiser step {number}: {line}", soft_wrap=True, highlight=False, markup=False)


def replay_bad_step(folder: Path, model: Path | None, config: Config, comm: Communicator) -> None:
    """Print the losses and gradient norms of its optimiser steps, computed anew with the weights of `model`, or with
    those in the folder."""
    step = read_bad_step(folder)
    results = replayed(step, model or folder / WEIGHTS, config, comm)
    _print_updates(Console(), step, results)
    applied = [update.version for update in step.updates if update.version != step.weights_version]
    if model is None and applied:
        Console().print(
            f"the weights kept are of version {step.weights_version}: an optimiser step on earlier ones "
            f"(version {', '.join(map(str, applied))}) had another loss",
            soft_wrap=True,
            highlight=False,
        )


def replayed(step: BadStep, model: Path, config: Config, comm: Communicator) -> dict[int, UpdateResult]:
    """By its number, every optimiser step computed again from the tokens by the actor of `config` (see
    `replay_recipe`); none is applied.

    Raises:
        ConfigError, ModelFolderError: `model` is no Hugging Face folder of the recipe's kind of model.
    """
    run_inputs.read_architecture(model, "--model")
    actor = build.build_rl_actor(config, model, comm)
    return {
        number: actor.update(
            update.sequences,
            update.objective,
            temperature=update.temperature,
            micro_batch_entropy_coeff=update.micro_batch_entropy_coeff,
            apply=False,
        )
        for number, update in enumerate(step.updates)
    }


def _print_updates(console: Console, step: BadStep, results: dict[int, UpdateResult]) -> None:
    """A table with a row an optimiser step or, where the console is narrower, a line a value: no number is cut."""
    rows = [_row(number, update, results.get(number)) for number, update in enumerate(step.updates)]
    table = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(str(step.folder), soft_wrap=True, highlight=False, markup=False)
    if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        width = max(map(len, row))
        for name, value in row.items():
            console.print(f"{name:<{width}}  {value}", soft_wrap=True, highlight=False, markup=False)


def _row(number: int, update: KeptUpdate, result: UpdateResult | None) -> dict[str, str]:
    """What is shown of an optimiser step, by column."""
    again = (
        {"loss from log-probs": _shown(loss_of(update))}
        if result is None
        else {"loss again": _shown(result.loss), "norm again": _shown(result.grad_norm)}
    )
    return {
        "optimiser step": str(number + 1),
        "sequences": str(len(update.sequences)),
        "replayed": str(sum(sequence.replayed for sequence in update.sequences)),
        "weights": f"version {update.version}",
        "loss": _shown(update.loss),
        "norm": _shown(update.grad_norm),
        "skipped": "raised" if update.skipped is None else "yes" if update.skipped else "no",
        **again,
    }


def _largest_ratios(update: KeptUpdate) -> list[str]:
    """The sequences that have the largest or no finite ratio, with where and what they are."""
    peaks = [float(np.nan_to_num(row, nan=math.inf).max(initial=-math.inf)) for row in update.log_ratio]
    lines = []
    for place in sorted(range(len(peaks)), key=lambda place: -peaks[place])[:MAX_SHOWN]:
        sequence, origin = update.sequences[place], update.origins[place]
        token = int(np.argmax(np.nan_to_num(update.log_ratio[place], nan=math.inf)))
        kind = "stored" if sequence.replayed else "new"
        lines.append(
            f"log-ratio {update.log_ratio[place][token]:.4g} at token {token} of {len(sequence.response_ids)}, {kind} "
            f"answer to question {origin.question_id!r}, advantage {sequence.advantage:.4g}: {origin.answer[:100]!r}"
        )
    return lines


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"
