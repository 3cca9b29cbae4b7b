"""`exgrpo data`: question files from the sets that others publish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron.data.foreign_kinds import SolutionOf, SourceFormat
from exgrpo_megatron.process import quiet_libraries
from exgrpo_megatron.stop import ended_by_sigterm

app = typer.Typer(help="Question files: made from OpenR1-Math, DAPO and others.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Question files: made from OpenR1-Math, DAPO and others."""


@app.command()
def prepare(
    files: Annotated[list[Path], typer.Argument(help="Parquet or JSONL files, in order.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Question file to write: .jsonl or .parquet.", show_default=False)],
    held_out: Annotated[
        Path | None, typer.Option(help="A second file, for data.validation: a share of the questions.")
    ] = None,
    held_out_share: Annotated[
        float | None, typer.Option(help="Of the questions, by a hash of the text: always the same. Default: 0.01")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Default: OUT with the ending .report.json.")] = None,
    format: Annotated[
        SourceFormat | None,
        typer.Option(help="openr1: problem, answer; verl (DAPO): prompt, reward_model. Default: by the columns."),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option(help="Column, or field as in extra_info.split. Default: problem_type, source, data_source."),
    ] = None,
    solutions: Annotated[
        SolutionOf, typer.Option(help="written: column solution; reasoning: the answer in messages or target.")
    ] = SolutionOf.none,
    drop_type: Annotated[
        list[str] | None, typer.Option(help="A question_type to leave out: MCQ, proof. Several times for several.")
    ] = None,
    verified: Annotated[
        bool, typer.Option("--verified", help="Only rows that correctness_... or ..._is_valid says are right.")
    ] = False,
    max_question_chars: Annotated[int | None, typer.Option(min=1)] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder, to count tokens with.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of the question in the chat template, without the recipe's texts.")
    ] = None,
    keep_instructions: Annotated[
        bool, typer.Option("--keep-instructions", help="Leave known texts around questions of verl files.")
    ] = False,
    check_answers: Annotated[
        bool, typer.Option("--check-answers/--no-check-answers", help="Ask Math-Verify about every answer.")
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of Math-Verify. Default: CPU cores, at most 8.")
    ] = None,
) -> None:
    """Question files from OpenR1-Math-style or DAPO-style ones, and what was left out and why."""
    quiet_libraries()
    from exgrpo_megatron.data.prepare import PrepareRequest  # noqa: PLC0415
    from exgrpo_megatron.data.prepare import prepare as prepared  # noqa: PLC0415

    request = PrepareRequest(
        files, out, held_out, held_out_share, report, format, category, solutions, keep_instructions, drop_type or [],
        verified, max_question_chars, max_prompt_tokens, tokenizer, check_answers,
        workers or min(8, os.cpu_count() or 1),
    )  # fmt: skip
    with ended_by_sigterm():
        found = prepared(request)
    console = Console()
    for line in found.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
