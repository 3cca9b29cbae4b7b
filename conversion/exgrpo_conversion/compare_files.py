"""Configs and tokenizers of two checkpoints: what decides the function computed, and what is read as text."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.config_file import read_json
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.file_checks import file_inside
from exgrpo_conversion.hf_folder import tokenizer_files
from exgrpo_conversion.source import Source


@dataclass(frozen=True)
class FileFinding:
    """One thing that is not the same in both."""

    name: str
    """A value of the model (`rope_theta`), a key of config.json, or a tokenizer file."""
    first: str
    second: str
    is_fault: bool
    """False: worth knowing, but it changes nothing that is computed from the same tokens."""


def compare_configs(first: Source, second: Source, *, tie_is_fault: bool) -> Iterator[FileFinding]:
    """Values of the model that differ, as they are understood: absent keys and old spellings have their meaning.

    `tie_is_fault`: whether it matters that only one side takes its output layer from the embedding.
    """
    for field in fields(Architecture):
        mine, its = getattr(first.arch, field.name), getattr(second.arch, field.name)
        if mine != its:
            yield FileFinding(field.name, str(mine), str(its), is_fault=tie_is_fault or field.name != "tied")
    for key in sorted((first.config.keys() | second.config.keys()) - _UNDERSTOOD - _EXPECTED):
        mine, its = first.config.get(key), second.config.get(key)
        if mine != its:
            yield FileFinding(key, _shown(mine), _shown(its), is_fault=key in _TOKEN_KEYS)


def compare_tokenizers(first: Path, second: Path) -> Iterator[FileFinding]:
    """Tokenizer files that differ or are missing; one that only the second has is no fault.

    JSON files are the same if they hold the same values.
    """
    mine, its = tokenizer_files(first), tokenizer_files(second)
    for name in sorted({*mine, *its}):
        if name not in its:
            yield FileFinding(name, "there", "missing", is_fault=True)
        elif name not in mine:
            yield FileFinding(name, "missing", "there", is_fault=False)
        elif not _same_content(file_inside(first, name), file_inside(second, name)):
            before, after = (f"{(folder / name).stat().st_size} bytes" for folder in (first, second))
            yield FileFinding(name, before, after, is_fault=True)


_TOKEN_KEYS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})

_UNDERSTOOD = frozenset(
    {
        "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
        "rope_parameters", "max_position_embeddings",
    }
)  # fmt: skip
"""Keys that are compared as values of the architecture."""

_EXPECTED = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path"})
"""Keys that may differ: the tensors are compared with their dtypes, the others say where a file comes from."""


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _same_content(first: Path, second: Path) -> bool:
    if filecmp.cmp(first, second, shallow=False):
        return True
    if first.suffix != ".json":
        return False
    try:
        return read_json(first) == read_json(second)
    except (ModelFolderError, RecursionError):
        return False
