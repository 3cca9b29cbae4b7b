"""The tokenizer as the rest of the package sees it: prompts, responses, and the tokens that end them."""

from __future__ import annotations

import hashlib
import json
import logging
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.types import TokenIds

_LOG = logging.getLogger(__name__)

_VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Some templates write today's date into the prompt; the same question would then have another prompt (and the data
# another fingerprint) tomorrow. The macro shadows the function they call.
_FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


def load_tokenizer(folder: str | Path) -> PromptTokenizer:
    """The tokenizer of a local Hugging Face folder.

    Raises:
        ConfigError: the folder is missing, holds no vocabulary, or transformers cannot read it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"no tokenizer: there is no folder {path} (policy.tokenizer.name, or policy.model_name where that is "
            f"null); give the path of a local Hugging Face folder"
        )
    # Without a vocabulary file transformers makes up a tokenizer of one token from config.json, silently.
    if not any((path / name).is_file() for name in _VOCABULARY_FILES):
        raise ConfigError(
            f"no tokenizer in {path} (policy.tokenizer.name, or policy.model_name where that is null): it has none of "
            f"{', '.join(_VOCABULARY_FILES)}; copy them from the original model, or set policy.tokenizer.name"
        )
    return PromptTokenizer(_from_pretrained(path), path)


class PromptTokenizer:
    """Turns questions into prompts and token ids into text; made by `load_tokenizer`."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = tokenizer
        self._chat_template: str | None = None
        if tokenizer.chat_template is None:
            _LOG.warning("the tokenizer of %s has no chat template: prompts are the plain text", folder)
            return
        self._chat_template = tokenizer.get_chat_template()
        if "strftime_now" in self._chat_template:
            _LOG.info("the chat template of %s writes the date: it is fixed, so that prompts stay the same", folder)
            self._chat_template = _FIXED_DATE + self._chat_template

    @property
    def has_chat_template(self) -> bool:
        """False: prompts are the plain text."""
        return self._chat_template is not None

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a response."""
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of {self.folder} (policy.tokenizer.name, or policy.model_name where that is null) "
                f"names no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )
        return int(self._tokenizer.eos_token_id)

    @property
    def eos_text(self) -> str:
        """Text of the token that ends a response."""
        return str(self._tokenizer.convert_ids_to_tokens(self.eos_id))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id of a token, added ones included (a model's embedding may have more rows).

        The number of tokens is less than that where the ids have gaps.
        """
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash over all tokens and their ids: equal for equal vocabularies only."""
        listed = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]

    def encode_prompt(self, question_text: str, system_prompt: str | None, template: str) -> TokenIds:
        """The prompt of a question: `template` with {question} replaced is the user's message.

        The chat template is rendered up to where the response begins. Without one, the prompt is the plain text
        (system prompt, empty line, message) with the tokenizer's own opening tokens.
        """
        message = template.replace("{question}", question_text)
        if self._chat_template is None:
            text = message if system_prompt is None else f"{system_prompt}\n\n{message}"
            ids = self._tokenizer.encode(text, add_special_tokens=True)
            # A tokenizer that closes a text by itself would end the response before it has begun.
            if ids and ids[-1] == self._tokenizer.eos_token_id:
                ids = ids[:-1]
        else:
            ids = self.encode(self._render(message, system_prompt))
        return np.asarray(ids, dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without opening or closing tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, special_tokens: bool = False) -> str:
        """Text of a response; special tokens are left out unless asked for."""
        return self._decode(token_ids, skip_special_tokens=not special_tokens)

    def can_write(self, text: str, *, special_tokens: bool = False) -> bool:
        """False where tokenising `text` would lose characters, which byte-level vocabularies never do.

        Unless `special_tokens` are expected in `text`, it is also False where `text` contains the name of one: a
        question that says "<|im_end|>" would end the user's message.
        """
        decoded = self._decode(self.encode(text), skip_special_tokens=not special_tokens)
        return _essence(decoded) == _essence(text)

    def stop_token_ids(self, folder: str | Path) -> tuple[int, ...]:
        """Sorted ids that end a response: eos of the generation config in `folder` (the model's), and the tokenizer's.

        Raises:
            ConfigError: the generation config is damaged, or neither names a token.
        """
        path = Path(folder) / "generation_config.json"
        ids = set(_generation_eos(path))
        if self._tokenizer.eos_token_id is not None:
            ids.add(int(self._tokenizer.eos_token_id))
        if not ids:
            raise ConfigError(
                f"nothing ends a response: neither {path} nor the tokenizer of {self.folder} names an "
                f"end-of-sequence token; set policy.generation.stop_token_ids"
            )
        return tuple(sorted(ids))

    def _render(self, message: str, system_prompt: str | None) -> str:
        messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        messages.append({"role": "user", "content": message})
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._chat_template, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = " and ".join(entry["role"] for entry in messages)
            raise ConfigError(
                f"the chat template of {self.folder} does not render a {roles} message: {error}; where it knows no "
                f"system message, set data.system_prompt to null and put the text into data.prompt_template"
            ) from error

    def _decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            [int(token) for token in token_ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


def _from_pretrained(path: Path) -> Any:
    # Importing transformers' tokenizers takes two seconds, which `exgrpo show` and --help must not pay.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise ConfigError(
            f"the tokenizer in {path} (policy.tokenizer.name, or policy.model_name where that is null) cannot be "
            f"read: {type(error).__name__}: {error}; copy the tokenizer files anew"
        ) from error


def _generation_eos(path: Path) -> list[int]:
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it from the original model, or remove it") from error
    eos = content.get("eos_token_id") if isinstance(content, dict) else None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them, found {eos!r}")
    return ids


def _essence(text: str) -> str:
    """`text` without what tokenizers may change on purpose: spaces, case, and the composition of characters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
