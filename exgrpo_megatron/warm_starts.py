"""Where warm starts are kept, by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_megatron import __version__
from exgrpo_megatron.config import Config, DataSourceConfig
from exgrpo_megatron.data.solutions import read_solutions
from exgrpo_megatron.files import sha256_of
from exgrpo_megatron.run_inputs import Inputs

if TYPE_CHECKING:
    pass


def warm_start_dir(config: Config, inputs: Inputs) -> Path:
    """Where the warm start of this model, data and `sft:` section is kept; any change of them changes the name."""
    of_model = {
        **warm_start_identity(config),
        "model": _folder_fingerprint(inputs.model_dir),
        "rows": _supervised_rows(config),
    }
    identity = json.dumps(of_model, sort_keys=True)
    name = config.policy.model_name.replace("embedded:", "").rstrip("/").rsplit("/", 1)[-1]
    return Path(config.sft.warm_start_dir) / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def warm_start_identity(config: Config) -> dict[str, Any]:
    """All of a recipe that a warm start depends on, but for its model's files and the content of its data."""
    policy = config.policy
    return {
        "version": __version__,
        "sft": config.sft.model_dump(mode="json", exclude={"warm_start", "warm_start_dir", "data"}),
        "source": _supervised_source(config.sft.data or config.data.train),
        "prompt": [config.data.system_prompt, config.data.prompt_template, config.data.max_input_seq_length],
        "precision": [policy.precision, policy.max_grad_norm, policy.skip_grad_norm_above],
        "length": policy.max_total_sequence_length,
    }


def _supervised_source(source: DataSourceConfig) -> dict[str, Any]:
    """What supervised batches depend on: a generator writes new questions for them, whatever its seeds and size."""
    dumped = source.model_dump(mode="json")
    if source.generator is None:
        return dumped
    return {name: dumped[name] for name in ("generator", "generator_difficulties")}


def _supervised_rows(config: Config) -> str | None:
    """Hash of the solutions that a file or function gives; None for a generator."""
    key, source = ("data.train", config.data.train) if config.sft.data is None else ("sft.data", config.sft.data)
    if not source.has_rows:
        return None
    digest = hashlib.sha256()
    for solution in islice(read_solutions(source, key), source.max_questions):
        digest.update(json.dumps([solution.question, solution.text]).encode())
    return digest.hexdigest()


def _folder_fingerprint(folder: Path) -> list[object]:
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".safetensors"})
    return [[path.name, sha256_of(path)] for path in files]
