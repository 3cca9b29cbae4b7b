"""What is checked of an exported Hugging Face folder before anybody gets to see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
from exgrpo_conversion.hf_folder import CONFIG_FILE, HFReader, read_config
from exgrpo_conversion.mapping import manifest
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.types import ScoredSequence, TokenIds

Probes = Sequence[tuple[TokenIds, TokenIds]]
"""(Prompt, response) pairs of which the log-probs are compared."""

ABSOLUTE, RELATIVE = 1e-4, 1e-5
"""Accepted difference of a log-prob computed in float32: nats, and a share of its size (of what is very unlikely, the
numbers are large, and so is their rounding)."""

BFLOAT16_MEAN = 0.5
"""Accepted mean difference of log-probs computed in bfloat16, in nats. Sums of 8 bits in another order are 0.1 apart in
a model of 30 layers, single ones 0.7; a model with a wrong mapping is several nats off."""

_TEXTS = ("What is 12 + 7 - 5?", "Let x = 3/4.\nThen \\boxed{x^2} is  9/16 — ok?")
_LOADING_FAULTS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
_TOKENIZER_MARKS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class LogprobMismatchError(CheckpointError):
    """The exported model computes something else than the one it was made from."""


def probe_sequences(vocab_size: int, max_positions: int) -> list[tuple[TokenIds, TokenIds]]:
    """Sequences of random tokens of different lengths, all but the longest nearly all response."""
    generator = np.random.default_rng(0)
    sequences = []
    for length, of_prompt in ((8, 2), (17, 2), (32, 2), (256, 240)):
        tokens = generator.integers(0, vocab_size, min(length, max_positions), dtype=np.int32)
        prompt = min(max(2, len(tokens) - (length - of_prompt)), len(tokens) - 1)
        sequences.append((tokens[:prompt], tokens[prompt:]))
    return sequences


def check_config(config_dir: Path, arch: Architecture) -> None:
    """Raise CheckpointError where the config.json there describes another model than `arch`, with key and values."""
    try:
        found = asdict(Architecture.from_hf_config(read_config(config_dir)))
    except UnsupportedModelError as error:
        raise CheckpointError(f"{config_dir / CONFIG_FILE}: {error}") from None
    differences = [
        f"{key} = {found[key]!r}, trained with {value!r}" for key, value in asdict(arch).items() if found[key] != value
    ]
    if differences:
        raise CheckpointError(
            f"{config_dir / CONFIG_FILE} is not of the model that was trained: {'; '.join(differences)}"
        )


def stored_dtype(folder: Path) -> str:
    """The dtype of the tensors there, of which there is one."""
    with HFReader(folder) as reader:
        return str(reader.dtype(reader.names()[0])).removeprefix("torch.")


def compare_tensors(
    folder: Path, arch: Architecture, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None
) -> int:
    """Compare every tensor of the folder bit for bit with `weights` as `dtype`; returns the number of parameters.

    Holds one tensor of each side at a time. `weights` is read to its end also where there is a difference.

    Raises:
        CheckpointError: names the first tensor that differs, with how many of its values do and by how much.
        ModelFolderError: names a file or tensors that are missing, unexpected or of another shape.
    """
    fault, count, seen = "", 0, set()
    with HFReader(folder) as reader:
        reader.check(manifest(arch))
        for name, tensor in weights:
            seen.add(name)
            count += tensor.numel()
            fault = fault or _difference(name, reader.get(name), tensor.detach().to("cpu", dtype or tensor.dtype))
    unseen = manifest(arch).keys() - seen
    if fault or unseen:
        raise CheckpointError(fault or f"tensor {min(unseen)} has nothing to be compared with")
    return count


def load_exported(folder: Path, dtype: torch.dtype | None, device: torch.device) -> torch.nn.Module:
    """The folder as transformers reads it, computing in `dtype` (None: its own); raises CheckpointError."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    faults = [f"{kind} {sorted(map(str, loading[kind]))}" for kind in _LOADING_FAULTS if loading.get(kind)]
    if faults:
        raise CheckpointError(f"transformers does not load it cleanly: {'; '.join(faults)}")
    return model.to(device).eval()


def compare_with_scores(model: torch.nn.Module, probes: Probes, scores: Sequence[ScoredSequence]) -> float:
    """Largest difference of the responses' log-probs and entropies from the trainer's, in nats.

    Raises:
        LogprobMismatchError: they are further apart than rounding explains.
    """
    found, expected = [], []
    for (prompt, response), mine in zip(probes, scores, strict=True):
        logprobs = vocabulary_logprobs(model, prompt, response)
        found += [logprobs.gather(1, torch.from_numpy(response).long()[:, None]).squeeze(1)]
        found += [-(logprobs.exp() * logprobs).sum(-1)]
        expected += [torch.from_numpy(mine.logprobs), torch.from_numpy(mine.entropies)]
    dtype = next(model.parameters()).dtype
    return _accepted(torch.cat(found), torch.cat(expected), dtype, "the trainer's")


def compare_with_logprobs(model: torch.nn.Module, probes: Probes, expected: Sequence[Tensor]) -> float:
    """Largest difference over the whole vocabulary, in nats; raises LogprobMismatchError."""
    found = [vocabulary_logprobs(model, prompt, response) for prompt, response in probes]
    return _accepted(
        torch.cat(found), torch.cat(list(expected)), torch.float32, "those of the checkpoint in Megatron-Core"
    )


@torch.no_grad()
def vocabulary_logprobs(model: torch.nn.Module, prompt: TokenIds, response: TokenIds) -> Tensor:
    """Log-prob of every token at each response position under a transformers model, [response tokens, vocabulary]."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long().to(next(model.parameters()).device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).cpu()


def compare_tokenizers(folder: Path, tokenizer_dir: Path) -> bool:
    """Whether there is a tokenizer; it must then encode, decode and render chats as that in `tokenizer_dir`.

    Raises:
        CheckpointError: names the text or the chat template that differs.
    """
    if not any((tokenizer_dir / name).exists() for name in _TOKENIZER_MARKS):
        return False
    source, exported = (AutoTokenizer.from_pretrained(path) for path in (tokenizer_dir, folder))
    for text in _TEXTS:
        theirs: Sequence[int] = source(text)["input_ids"]
        mine: Sequence[int] = exported(text)["input_ids"]
        if mine != theirs or exported.decode(mine) != source.decode(theirs):
            raise CheckpointError(f"its tokenizer encodes or decodes {text!r} otherwise than that of {tokenizer_dir}")
    if exported.chat_template != source.chat_template:
        raise CheckpointError(f"its chat template is not that of {tokenizer_dir}")
    return True


def _difference(name: str, found: Tensor, expected: Tensor) -> str:
    """Empty where they are equal."""
    if found.dtype != expected.dtype:
        return f"tensor {name} is {found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"tensor {name} has shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if torch.equal(found, expected):
        return ""
    apart = (found.float() - expected.float()).abs()
    return (
        f"tensor {name} differs from the checkpoint's in {int((found != expected).sum())} of {found.numel()} values, "
        f"by up to {float(apart.max()):.2e}"
    )


def _accepted(found: Tensor, expected: Tensor, dtype: torch.dtype, whose: str) -> float:
    """The largest difference; a NaN is never accepted."""
    apart = (found - expected).abs()
    worst, mean = float(apart.max()), float(apart.mean())
    if dtype == torch.float32:
        same = bool((apart <= ABSOLUTE + RELATIVE * expected.abs()).all())
        rule = f"by up to {worst:.2e} nats, allowed is {ABSOLUTE:.0e} and {RELATIVE:.0e} of their size"
    else:
        same = mean <= BFLOAT16_MEAN
        rule = f"by {mean:.2e} nats on average, allowed in {dtype} is {BFLOAT16_MEAN}"
    if not same:
        raise LogprobMismatchError(f"its log-probs differ from {whose} {rule}")
    return worst
