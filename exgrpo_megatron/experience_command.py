"""`exgrpo experience`: look at the stored answers of a run, check them, and move them to other runs and tools."""

from __future__ import annotations

import json as json_format
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.process import quiet_libraries
from exgrpo_megatron.stop import ended_by_sigterm

# What reads Parquet or needs torch is imported inside the commands: --help answers at once.

app = typer.Typer(
    help="The stored answers of a run: statistics, one question's history, export, import, checks, rescoring.",
    no_args_is_help=True,
)


class FileFormat(StrEnum):
    """What `exgrpo experience export` writes."""

    parquet = "parquet"
    jsonl = "jsonl"


SourceArgument = Annotated[
    Path,
    typer.Argument(help="Folder of a run, a checkpoint, or exported experience (folder or file).", show_default=False),
]
StepOption = Annotated[
    int | None, typer.Option(min=0, help="Of the run's checkpoint. Default: the newest one's", show_default=False)
]
OutOption = Annotated[Path, typer.Option(help="Folder to write; must not exist.", show_default=False)]
RecipeOption = Annotated[
    Path | None, typer.Option(help="Recipe of the questions. Default: that of the run", show_default=False)
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Folder of the tokenizer. Default: that of the recipe", show_default=False)
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option(min=2, help="Answers of a group (K), where the files do not say it.", show_default=False),
]


@app.command()
def stats(
    source: SourceArgument,
    step: StepOption = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Questions, answers, bytes, buckets, ages, lengths, entropies; what was retired or evicted; the data left."""
    quiet_libraries()
    from exgrpo_megatron.experience_tools.sources import find_source  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.stats import measure, print_stats  # noqa: PLC0415

    found = measure(find_source(source, step))
    if json:
        sys.stdout.write(json_format.dumps(found.as_json(), indent=1) + "\n")
    else:
        print_stats(found, Console())


@app.command()
def show(
    source: SourceArgument,
    question: Annotated[
        str, typer.Argument(help="Id, the beginning of one id, or text of one question.", show_default=False)
    ],
    step: StepOption = None,
    last: Annotated[
        int | None, typer.Option(min=0, help="Only so many events. Default: all", show_default=False)
    ] = None,
    recipe: RecipeOption = None,
    tokenizer: TokenizerOption = None,
) -> None:
    """One question: its history in the run, and its stored answers with their texts."""
    quiet_libraries()
    from exgrpo_megatron.experience_tools.show import show_question  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.sources import find_source  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.texts import Texts  # noqa: PLC0415

    found = find_source(source, step)
    show_question(found, question, Texts(found, recipe, tokenizer), last, Console())


@app.command()
def export(
    source: SourceArgument,
    out: OutOption,
    to: Annotated[FileFormat, typer.Option(help="Format to write.")] = FileFormat.parquet,
    step: StepOption = None,
    texts: Annotated[
        bool, typer.Option("--texts", help="Also the texts of questions and answers, in columns of their own.")
    ] = False,
    recipe: RecipeOption = None,
    tokenizer: TokenizerOption = None,
    group_size: GroupSizeOption = None,
) -> None:
    """Every stored answer as a row of Parquet (also for experience.prefill_path) or JSON lines."""
    quiet_libraries()
    from exgrpo_megatron.experience_tools.sources import find_source  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.texts import Texts  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.transfer import export_experience  # noqa: PLC0415

    if not texts and recipe:
        raise ConfigError("--recipe is for --texts: leave it out, or ask for texts")
    found = find_source(source, step)
    at_hand = Texts(found, recipe, tokenizer)
    with ended_by_sigterm():
        written = export_experience(found, out, to.value, at_hand, group_size, with_texts=texts)
    _say(written.describe(), *(f"note: {note}" for note in at_hand.notes))


@app.command(name="import")
def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Parquet or JSON-lines files, or exported folders.", show_default=False)
    ],
    out: OutOption,
    group_size: GroupSizeOption = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer that the token ids are of: they are checked.", show_default=False),
    ] = None,
) -> None:
    """Rows of other runs or tools, checked one by one, as a folder for experience.prefill_path."""
    quiet_libraries()
    from exgrpo_megatron.data.tokenizer import load_tokenizer  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.rows import RowCheck  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.texts import vocabulary_name  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.transfer import common_vocabulary, import_experience  # noqa: PLC0415

    loaded = load_tokenizer(tokenizer) if tokenizer else None
    named = vocabulary_name(loaded, str(tokenizer)) if loaded else None
    known = common_vocabulary(files)
    if named and known and named.fingerprint != known.fingerprint:
        raise ConfigError(f"--tokenizer {tokenizer}: it has {named}, but the files' token ids are of {known}")
    vocabulary = known or named
    check = RowCheck(group_size, vocabulary.vocab_size if vocabulary else None)
    with ended_by_sigterm():
        written = import_experience(files, out, check, vocabulary=vocabulary)
    _say(written.describe())


@app.command()
def verify(source: SourceArgument, step: StepOption = None) -> None:
    """Check every record, the index against the segments, counts and history. Exit code 1 where one is wrong."""
    quiet_libraries()
    from exgrpo_megatron.experience_tools.sources import find_source  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.verify import verify as verified  # noqa: PLC0415

    found = verified(find_source(source, step))
    _say(*found.faults, *(f"note: {note}" for note in found.notes), found.describe())
    if found.faults:
        raise typer.Exit(1)


@app.command()
def rescore(
    source: SourceArgument,
    model: Annotated[Path, typer.Argument(help="A run's checkpoint or a Hugging Face folder.", show_default=False)],
    out: OutOption,
    step: StepOption = None,
    recipe: RecipeOption = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the tokenizer that wrote the answers, where nothing says it.", show_default=False),
    ] = None,
) -> None:
    """The answers with their log-probs under MODEL, so that a run of it can begin with them; how far they moved."""
    quiet_libraries()
    from exgrpo_megatron.experience_tools.rescore import RescoreRequest  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.rescore import rescore as rescored  # noqa: PLC0415
    from exgrpo_megatron.experience_tools.sources import find_source  # noqa: PLC0415

    request = RescoreRequest(find_source(source, step), model, out, recipe, tokenizer)
    with ended_by_sigterm():
        written, moved = rescored(request)
    _say(written.describe(), *moved.describe())


def _say(*lines: str) -> None:
    console = Console()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
