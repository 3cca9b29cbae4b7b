"""Two real tokenizers: the embedded model's, and a byte-level one with a ChatML template that writes any text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exgrpo_megatron.config import Config
from exgrpo_megatron.data.embedded_model import CHAIN_QWEN2, SYMBOLS_QWEN2, materialize
from exgrpo_megatron.data.tokenizer import PromptTokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def chain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(CHAIN_QWEN2, tmp_path_factory.mktemp("embedded") / "model", seed=0)


@pytest.fixture(scope="session")
def chain_tokenizer(chain_folder: Path) -> PromptTokenizer:
    return load_tokenizer(chain_folder)


@pytest.fixture(scope="session")
def symbols_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(SYMBOLS_QWEN2, tmp_path_factory.mktemp("embedded") / "symbols", seed=0)


@pytest.fixture(scope="session")
def symbols_tokenizer(symbols_folder: Path) -> PromptTokenizer:
    return load_tokenizer(symbols_folder)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("bytes") / "tokenizer"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_folder: Path) -> PromptTokenizer:
    return load_tokenizer(byte_folder)


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """Copies a tokenizer folder and overwrites (text) or removes (None) files in the copy."""

    def alter(folder: Path, **files: str | None) -> Path:
        copy = tmp_path / "altered"
        shutil.copytree(folder, copy)
        for name, text in files.items():
            path = copy / name.replace("__", ".")
            if text is None:
                path.unlink()
            else:
                path.write_text(text, encoding="utf-8")
        return copy

    return alter


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def recipe(train: dict[str, Any], sft: dict[str, Any] | None = None, **data: Any) -> Config:
    """A recipe with these questions and defaults for everything else."""
    policy = {"model_name": "m", "max_total_sequence_length": 8192}
    return Config.model_validate({"data": {"train": train, **data}, "policy": policy, "sft": sft or {}})


@pytest.fixture
def make_recipe() -> Callable[..., Config]:
    return recipe
