"""Hugging Face export that is checked against the trainer before it takes the place of an older one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_folder import CONFIG_FILE, write_hf_folder
from exgrpo_megatron.errors import CheckpointError, UserError
from exgrpo_megatron.policy.actor import MegatronActor
from exgrpo_megatron.types import ScoredSequence, TokenIds

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest accepted difference of a log-prob (nats) between the export and the trainer, by dtype of the weights."""

_TEXTS = ("What is 12 + 7 - 5?", "Let x = 3/4.\nThen \\boxed{x^2} is  9/16 — ok?")


@dataclass(frozen=True)
class ExportReport:
    """What was written and how far it is from the trainer."""

    folder: Path
    files: tuple[str, ...]
    num_parameters: int
    max_logprob_difference: float
    """Over every token of a few sequences, in nats."""
    tokenizer: bool
    """Whether the source folder had a tokenizer, which then went along and was checked."""

    def describe(self) -> str:
        """What was checked, in a few words."""
        tokenizer = "the same tokenizer" if self.tokenizer else "no tokenizer"
        return (
            f"{self.num_parameters:,} parameters, {tokenizer}, and as transformers reads it "
            f"log-probs within {self.max_logprob_difference:.0e} of the trainer's"
        )


def export_hf(actor: MegatronActor, dst: Path, source_dir: Path) -> ExportReport:
    """Write the policy as a Hugging Face folder to `dst`; collective over all processes, of which the main one writes.

    Tokenizer and settings come from `source_dir`. The folder is written beside `dst`, loaded again with transformers
    and compared with the trainer; only then does it replace what stood at `dst`.

    Raises:
        CheckpointError: on every process, when it could not be written or the exported model is not the trainer's;
            `dst` is then as it was before.
    """
    probes = _probe_sequences(actor.architecture.vocab_size, actor.architecture.max_positions)
    with actor.without_fp8():
        trainer = Probes(probes, actor.score(probes, temperature=1.0))
    weights = actor.export_weights()
    outcome: ExportReport | str = ""
    if actor.comm.is_main:
        try:
            outcome = _export(actor, weights, trainer, Path(dst).absolute(), Path(source_dir))
        except (UserError, ModelFolderError, OSError) as error:
            outcome = f"cannot export the model to {dst}: {error}"
    for _ in weights:
        pass  # processes that share the model hand each weight round: none may stop before the end
    outcome = actor.comm.broadcast(outcome)
    if isinstance(outcome, str):
        raise CheckpointError(outcome)
    return outcome


@dataclass(frozen=True)
class Probes:
    """Sequences, and what the trainer says of them."""

    sequences: list[tuple[TokenIds, TokenIds]]
    scores: list[ScoredSequence]


def verify_export(folder: Path, source_dir: Path, trainer: Probes, device: torch.device) -> ExportReport:
    """Load an exported folder with transformers and compare it with the trainer and with `source_dir`'s tokenizer.

    Raises:
        CheckpointError: names the tensors, the tokenizer text or the log-prob that differ.
    """
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    faults = [f"{kind} {sorted(map(str, loading[kind]))}" for kind in _LOADING_FAULTS if loading.get(kind)]
    if faults:
        raise CheckpointError(f"transformers does not load it cleanly: {'; '.join(faults)}")
    return ExportReport(
        folder=folder,
        files=tuple(sorted(path.name for path in folder.iterdir())),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        max_logprob_difference=_compare_logprobs(trainer, model.to(device).eval()),
        tokenizer=_compare_tokenizers(folder, source_dir),
    )


_LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def _export(
    actor: MegatronActor, weights: Iterator[tuple[str, Tensor]], trainer: Probes, dst: Path, source_dir: Path
) -> ExportReport:
    _refuse_bad_destination(dst, source_dir)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dst.parent, prefix=f".{dst.name}.", suffix=".unverified") as aside:
        candidate = Path(aside) / dst.name
        write_hf_folder(candidate, weights, arch=actor.architecture, source_dir=source_dir)
        report = verify_export(candidate, source_dir, trainer, actor.device)
        if dst.exists():
            os.rename(dst, Path(aside) / "replaced")
        try:
            os.rename(candidate, dst)
        except OSError:
            if (replaced := Path(aside) / "replaced").exists():
                os.rename(replaced, dst)
            raise
    return ExportReport(**{**vars(report), "folder": dst})


def _refuse_bad_destination(dst: Path, source_dir: Path) -> None:
    if source_dir.resolve().is_relative_to(dst.resolve()):
        raise CheckpointError(f"it would replace the source model {source_dir}: choose another folder")
    if dst.exists() and (not dst.is_dir() or (any(dst.iterdir()) and not (dst / CONFIG_FILE).exists())):
        raise CheckpointError(f"something is there already that is no model folder ({CONFIG_FILE} is missing)")


def _compare_logprobs(trainer: Probes, model: torch.nn.Module) -> float:
    device = next(model.parameters()).device
    worst = 0.0
    for (prompt, response), mine in zip(trainer.sequences, trainer.scores, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response])).long().to(device)
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
        its = logprobs[len(prompt) - 1 : -1].gather(1, tokens[len(prompt) :, None]).squeeze(1).cpu().numpy()
        worst = max(worst, float(np.abs(its - mine.logprobs).max()))
    bound = TOLERANCE[next(model.parameters()).dtype]
    if not worst <= bound:
        raise CheckpointError(
            f"its log-probs differ from the trainer's by up to {worst:.2e} nats, allowed is {bound:.0e}"
        )
    return worst


def _probe_sequences(vocab_size: int, max_positions: int) -> list[tuple[TokenIds, TokenIds]]:
    """Four sequences of random tokens, of different lengths."""
    generator = np.random.default_rng(0)
    lengths = [min(length, max_positions) for length in (8, 17, 32, 48)]
    tokens = [generator.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]
    return [(ids[:2], ids[2:]) for ids in tokens]


def _compare_tokenizers(folder: Path, source_dir: Path) -> bool:
    """Whether there is a tokenizer; it must then encode, decode and render chats as the source's."""
    if not any((source_dir / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return False
    source, exported = (AutoTokenizer.from_pretrained(path) for path in (source_dir, folder))
    for text in _TEXTS:
        theirs: Sequence[int] = source(text)["input_ids"]
        mine: Sequence[int] = exported(text)["input_ids"]
        if mine != theirs or exported.decode(mine) != source.decode(theirs):
            raise CheckpointError(f"its tokenizer encodes or decodes {text!r} otherwise than that of {source_dir}")
    if exported.chat_template != source.chat_template:
        raise CheckpointError(f"its chat template is not that of {source_dir}")
    return True
