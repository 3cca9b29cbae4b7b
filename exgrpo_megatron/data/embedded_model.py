"""The models that need no download: small Qwen2, each with a vocabulary of single characters for one embedded task."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from exgrpo_megatron.errors import ConfigError

PREFIX = "embedded:"
CHAIN_QWEN2 = "embedded:chain-qwen2"
SYMBOLS_QWEN2 = "embedded:symbols-qwen2"

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BOX = "\\boxed{"
"""Written as one token, the last of each vocabulary."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A Qwen2 with two layers, four heads and two key-value heads."""

    characters: str
    """What it can read and write, one token each, beside `SPECIAL_TOKENS` and `BOX`."""
    hidden_size: int
    intermediate_size: int
    probe: str
    """A text of the task with every kind of character, which the tokenizer must give back."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """All tokens in the order of their ids."""
        return (*SPECIAL_TOKENS, *self.characters, BOX)


MODELS = {
    # 397,056 parameters, a vocabulary of 21.
    CHAIN_QWEN2: EmbeddedModel("0123456789+-*=?\n}", 128, 384, "7+5=12\n12-3=9\n\\boxed{9}"),
    # 226,080 parameters, a vocabulary of 42: four letters and two shifts more than unknown_symbols has by now.
    SYMBOLS_QWEN2: EmbeddedModel("0123456789=?\n}abcdefghijklmnopABCDEFGH", 96, 288, "9E=6\n6B=9\n\\boxed{69}"),
}

_PAD_ID, _BOS_ID, _EOS_ID = range(3)
_MARKER = "embedded.json"
_CONTENT_VERSION = 1

# A literal newline before a tag would be eaten, hence the expression.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'user' %}{{ '=?\\n' }}{% elif m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def is_embedded(name: str) -> bool:
    """Whether a `policy.model_name` is an embedded model rather than a folder."""
    return name.startswith(PREFIX)


def materialize(name: str, folder: str | Path, seed: int) -> Path:
    """Write an embedded model as the Hugging Face folder `folder`, weights initialised from `seed`; returns `folder`.

    The folder appears whole or not at all. One that already holds this model of this seed, unchanged, is left alone;
    one of another seed, unchanged, is replaced. Call it on one rank only.

    Raises:
        ConfigError: the name is unknown, `folder` holds anything else, or it cannot be written.
    """
    if name not in MODELS:
        raise ConfigError(f"policy.model_name = {name!r} is not an embedded model; there are {', '.join(MODELS)}")
    target = Path(folder)
    recipe = {"name": name, "seed": seed, "version": _CONTENT_VERSION}
    if _holds(target, recipe):
        return target
    _check_replaceable(target)
    try:
        _replace(target, recipe, seed)
    except (OSError, SafetensorError) as error:
        # Another run may have put the same model there in the meantime.
        if not _holds(target, recipe):
            raise ConfigError(
                f"cannot write {name} to {target}: {error}; free space, or choose another folder"
            ) from error
    return target


def _replace(target: Path, recipe: dict[str, Any], seed: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        aside = Path(scratch) / "model"
        _write(MODELS[recipe["name"]], aside, seed)
        (aside / _MARKER).write_text(json.dumps({**recipe, "files": _hashes(aside)}, indent=2), encoding="utf-8")
        if target.exists():
            target.rename(Path(scratch) / "replaced")
        aside.rename(target)


def _write(model: EmbeddedModel, folder: Path, seed: int) -> None:
    # Both take seconds to import, which callers of is_embedded must not pay.
    import torch  # noqa: PLC0415
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    config = Qwen2Config(
        vocab_size=len(model.vocabulary),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=_PAD_ID,
        bos_token_id=_BOS_ID,
        eos_token_id=_EOS_ID,
    )
    with torch.random.fork_rng(devices=[]), _no_progress_bar():
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    _tokenizer(model).save_pretrained(folder)
    _check_round_trip(model, AutoTokenizer.from_pretrained(folder, local_files_only=True))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one for every model it saves."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _tokenizer(model: EmbeddedModel) -> Any:
    # transformers makes a Qwen2Tokenizer for every folder with a qwen2 config, whatever class the tokenizer was saved
    # as; only a genuine one therefore reads the same after it was saved.
    from transformers import Qwen2Tokenizer  # noqa: PLC0415

    pad, bos, eos = SPECIAL_TOKENS
    # Every token but the box, as byte-level BPE writes them: the newline is one printable character there.
    vocabulary = {("Ċ" if token == "\n" else token): index for index, token in enumerate(model.vocabulary[:-1])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=pad, pad_token=pad, bos_token=bos, eos_token=eos)
    tokenizer.add_tokens([BOX])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _check_round_trip(model: EmbeddedModel, tokenizer: Any) -> None:
    ids = {token: index for index, token in enumerate(model.vocabulary)}
    before, _, inside = model.probe.partition(BOX)
    expected = [ids[token] for token in (*before, BOX, *inside)]
    found = tokenizer.encode(model.probe, add_special_tokens=False)
    if found != expected or tokenizer.decode(found) != model.probe:
        raise ConfigError(
            f"the installed transformers reads the embedded model's tokenizer wrongly ({found}, not {expected}); "
            f"install a version that pyproject.toml names"
        )


def _holds(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether the folder has this very model, every file as it was written."""
    marker = _marker(folder)
    return _unchanged(folder, marker) and {**recipe, "files": marker["files"]} == marker


def _check_replaceable(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not _unchanged(folder, _marker(folder)):
        raise ConfigError(
            f"{folder} is in the way of the embedded model: it holds something else, or a model that was changed; "
            f"move it away, or choose another folder"
        )


def _marker(folder: Path) -> dict[str, Any]:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return marker if isinstance(marker, dict) else {}


def _unchanged(folder: Path, marker: dict[str, Any]) -> bool:
    return bool(marker) and marker.get("files") == _hashes(folder)


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != _MARKER)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
