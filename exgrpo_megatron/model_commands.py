"""`exgrpo convert` and `exgrpo export`: models as files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.export_request import ExportCheck, ExportDtype
from exgrpo_megatron.process import quiet_libraries

# What needs torch is imported inside the commands.


class TargetFormat(StrEnum):
    """What `exgrpo convert` writes."""

    hf = "hf"
    torch_dist = "torch_dist"
    nemo2 = "nemo2"


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
