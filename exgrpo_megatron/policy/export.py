"""Hugging Face export that is checked against its origin before it takes the place of an older one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_folder import write_hf_folder
from exgrpo_conversion.source import Source
from exgrpo_megatron.comm import Communicator, gather_everyone, together
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.policy.export_checks import (
    LogprobMismatchError,
    check_config,
    compare_tensors,
    compare_tokenizers,
    compare_with_logprobs,
    compare_with_scores,
    load_exported,
    probe_sequences,
)
from exgrpo_megatron.policy.export_folder import put_in_place, refuse_other_folders, unverified
from exgrpo_megatron.policy.reference_model import ReferenceModel, check_memory

CARD_FILE = "README.md"


@dataclass(frozen=True)
class ExportReport:
    """What was written and how far it is from its origin."""

    folder: Path
    files: tuple[str, ...]
    num_parameters: int
    tokenizer: bool
    """Whether there was a tokenizer, which then went along and was checked."""
    tensors_compared: bool = False
    """Whether every tensor was compared bit for bit."""
    compared_with: str = "the trainer's"
    max_logprob_difference: float | None = None
    """Over the tokens of a few sequences, in nats; None where tensors alone were compared."""
    rounding: float | None = None
    """How far the conversion to another dtype moved log-probs, in nats; None without one."""

    def describe(self) -> str:
        """What was checked, in a few words."""
        checks = [f"{self.num_parameters:,} parameters", "the same tokenizer" if self.tokenizer else "no tokenizer"]
        if self.tensors_compared:
            checks.append("every tensor bit for bit as trained")
        if self.max_logprob_difference is not None:
            checks.append(
                f"as transformers reads it log-probs within {self.max_logprob_difference:.0e} of {self.compared_with}"
            )
        if self.rounding:
            checks.append(f"rounding to another dtype moved log-probs by up to {self.rounding:.0e}")
        return "; ".join(checks)


@dataclass(frozen=True)
class ExportOptions:
    """What goes with the weights, and how they are written."""

    tokenizer_dir: Path | None = None
    """Where the tokenizer comes from, if not from the source folder."""
    card: Callable[[ExportReport], str] | None = None
    """Makes the text of README.md."""
    dtype: torch.dtype | None = None
    """Of the tensors; None: as they are."""
    max_shard_bytes: int = 5 * 10**9


def export_hf(actor: MegatronActor, dst: Path, source_dir: Path, options: ExportOptions | None = None) -> ExportReport:
    """Write the policy as a Hugging Face folder to `dst`; collective over all processes, of which the main one writes.

    Settings come from `source_dir`. The folder is written beside `dst`, loaded back into Megatron's layout and compared
    with the trainer's parameters bit for bit, and loaded with transformers and compared with the trainer's log-probs
    (unless memory does not suffice for that); only then does it replace what stood at `dst`.

    Raises:
        CheckpointError: on every process, when it could not be written or the exported model is not the trainer's;
            names the tensors, where it is their fault. `dst` is then as it was before.
    """
    options = options or ExportOptions()
    assert options.dtype is None, "the trainer's own dtype: comparing its log-probs with others' needs a tolerance"
    comm, arch, dst = actor.comm, actor.architecture, Path(dst).absolute()
    with _as_export_error(dst), _shared_candidate(comm, dst, source_dir) as candidate:
        weights = actor.export_weights()
        with together(comm), _as_checkpoint_errors():
            try:
                if comm.is_main:
                    _write(candidate, weights, arch, source_dir, options)
            finally:
                for _ in weights:
                    pass  # processes that share the model hand each weight round: none may stop before the end
        report = _compare_with_trainer(actor, candidate, options.tokenizer_dir or source_dir)
        with together(comm):
            if comm.is_main:
                report = _finish(report, dst, options)
        return comm.broadcast(report)


def export_checkpoint(
    source: Source, dst: Path, options: ExportOptions, policy_dir: Path | None = None
) -> ExportReport:
    """Write a run's checkpoint as a Hugging Face folder to `dst`, compared with the checkpoint before it is put there.

    Every tensor is read again and compared with the checkpoint's bit for bit. With `policy_dir`, the checkpoint's
    distributed part, also what the model computes: as Megatron-Core loads that, and as transformers loads the folder,
    both in float32 and from the same weights (rounded to the export's dtype, if that is another). That needs a process
    group of one and room for the model in float32; without it, two tensors are held at a time.

    Raises:
        CheckpointError: it could not be written, or is not the checkpoint's model; names tensor or key. `dst` is then
            as it was before.
    """
    dst = Path(dst).absolute()
    with _as_export_error(dst), unverified(dst, source.config_folder) as candidate:
        refuse_other_folders(dst)
        if policy_dir is not None:
            check_memory(source.arch)
        _write(candidate, source.tensors(), source.arch, source.config_folder, options)
        report = _checked(candidate, source.arch, options.tokenizer_dir or source.config_folder)
        count = compare_tensors(candidate, source.arch, source.tensors(), options.dtype)
        report = replace(report, num_parameters=count, tensors_compared=True)
        if policy_dir is not None:
            report = _compare_with_checkpoint(report, source.arch, policy_dir, options.dtype)
        return _finish(report, dst, options)


def _write(
    candidate: Path, weights: Iterable[tuple[str, Tensor]], arch: Architecture, source_dir: Path, options: ExportOptions
) -> None:
    check_config(source_dir, arch)
    write_hf_folder(
        candidate,
        weights,
        arch=arch,
        source_dir=source_dir,
        tokenizer_dir=options.tokenizer_dir,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
    )


def _checked(candidate: Path, arch: Architecture, tokenizer_dir: Path) -> ExportReport:
    """What needs no weights."""
    check_config(candidate, arch)
    tokenizer = compare_tokenizers(candidate, tokenizer_dir)
    files = tuple(sorted(path.name for path in candidate.iterdir()))
    return ExportReport(candidate, files, 0, tokenizer)


def _compare_with_trainer(actor: MegatronActor, candidate: Path, tokenizer_dir: Path) -> ExportReport:
    """Collective; the report is the main process's."""
    comm, arch = actor.comm, actor.architecture
    report: ExportReport | None = None
    with together(comm), _as_checkpoint_errors():
        if comm.is_main:
            report = _checked(candidate, arch, tokenizer_dir)
    loaded_back = _compare_loaded_back(actor, candidate)
    device = _device_with_room(candidate, actor.device) if comm.is_main else None
    if not comm.anywhere(device is not None):
        return _compare_read_again(actor, candidate, report)
    probes = probe_sequences(arch.vocab_size, actor.max_sequence_length)
    with actor.without_fp8():
        scores = actor.score(probes, temperature=1.0)
    with together(comm), _as_checkpoint_errors():
        if report is not None and device is not None:
            model = load_exported(candidate, None, device)
            report = replace(
                report,
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
                tensors_compared=loaded_back,
                max_logprob_difference=compare_with_scores(model, probes, scores),
            )
    return _from_main(comm, report)


def _compare_loaded_back(actor: MegatronActor, candidate: Path) -> bool:
    """Whether all of the first data-parallel rank's processes see the folder, and so found their parameters in it.

    Raises:
        CheckpointError: names the tensors that are not as trained.
    """
    comm = actor.comm
    sees = comm.rank > 0 or candidate.is_dir()
    other: list[str] = []
    with together(comm), _as_checkpoint_errors():
        if comm.rank == 0 and sees:
            other = actor.other_tensors(candidate)
    everyones = [name for part in gather_everyone(comm, other) for name in part]
    if everyones:
        raise CheckpointError(_named(everyones))
    return not comm.anywhere(not sees)


def _compare_read_again(actor: MegatronActor, candidate: Path, report: ExportReport | None) -> ExportReport:
    """The tensors of a model that no memory here has room to run."""
    weights = actor.export_weights()
    with together(actor.comm), _as_checkpoint_errors():
        try:
            if report is not None:
                count = compare_tensors(candidate, actor.architecture, weights, None)
                report = replace(report, num_parameters=count, tensors_compared=True)
        finally:
            for _ in weights:
                pass
    return _from_main(actor.comm, report)


def _compare_with_checkpoint(
    report: ExportReport, arch: Architecture, policy_dir: Path, dtype: torch.dtype | None
) -> ExportReport:
    """One model after the other: they need not fit into memory together."""
    probes = probe_sequences(arch.vocab_size, arch.max_positions)
    reference = ReferenceModel(policy_dir, arch)
    expected = [reference.logprobs(*probe) for probe in probes]
    rounding = None
    if dtype is not None:
        reference.round(dtype)
        exact, expected = expected, [reference.logprobs(*probe) for probe in probes]
        rounding = max(float((a - b).abs().max()) for a, b in zip(exact, expected, strict=True))
    del reference
    model = load_exported(report.folder, torch.float32, torch.device("cpu"))
    try:
        worst = compare_with_logprobs(model, probes, expected)
    except LogprobMismatchError as error:
        del model
        others = ReferenceModel(policy_dir, arch).other_tensors(report.folder, dtype)
        raise CheckpointError(f"{error}; {_named(others)}") from None
    return replace(
        report,
        max_logprob_difference=worst,
        compared_with="those of the checkpoint in Megatron-Core",
        rounding=rounding,
    )


def _from_main(comm: Communicator, report: ExportReport | None) -> ExportReport:
    shared = comm.broadcast(report)
    assert shared is not None
    return shared


def _named(names: list[str]) -> str:
    found = list(dict.fromkeys(names))
    if not found:
        return "every tensor is as it was trained, so what differs is the model that config.json makes of them"
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"tensors are not as trained: {', '.join(found[:8])}{more}"


def _finish(report: ExportReport, dst: Path, options: ExportOptions) -> ExportReport:
    candidate = report.folder
    if options.card is not None:
        (candidate / CARD_FILE).write_text(options.card(report), encoding="utf-8")
    files = tuple(sorted(path.name for path in candidate.iterdir()))
    put_in_place(candidate, dst)
    return replace(report, folder=dst, files=files)


@contextmanager
def _shared_candidate(comm: Communicator, dst: Path, source_dir: Path) -> Iterator[Path]:
    """`_unverified` of the main process, known to all."""
    with ExitStack() as stack:
        candidate: Path | None = None
        with together(comm):
            if comm.is_main:
                candidate = stack.enter_context(unverified(dst, source_dir))
        shared = comm.broadcast(candidate)
        assert shared is not None
        yield shared


@contextmanager
def _as_export_error(dst: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, ModelFolderError, OSError) as error:
        raise CheckpointError(f"cannot export the model to {dst}: {error}") from error


@contextmanager
def _as_checkpoint_errors() -> Iterator[None]:
    """So that `together` hands it round."""
    try:
        yield
    except ModelFolderError as error:
        raise CheckpointError(str(error)) from error


def _device_with_room(candidate: Path, preferred: torch.device) -> torch.device | None:
    """Where transformers can run the exported model beside what is there; None: nowhere."""
    needed = _ROOM * sum(path.stat().st_size for path in candidate.glob("*.safetensors"))
    if preferred.type == "cuda" and torch.cuda.mem_get_info(preferred)[0] > needed:
        return preferred
    return torch.device("cpu") if psutil.virtual_memory().available > needed else None


_ROOM = 1.3
"""Bytes to run a model in, for each byte of its weights."""
