"""A saved buffer: the experience as a checkpoint of the trainer has it, the prompts, and a small JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_megatron.errors import CheckpointError
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.types import TokenIds

EXPERIENCE = "experience"
_STATE, _PROMPTS = "buffer.json", "prompts.parquet"
_SCHEMA = pa.schema(
    [
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
    ]
)


@dataclass(frozen=True)
class State:
    """What of a buffer the trainer's does not hold."""

    settings: dict[str, Any]
    generator: Mapping[str, Any]
    """State of the bit generator."""
    step: int
    prompts: dict[str, TokenIds]


def write(folder: Path, state: State, experience: ExperienceBuffer) -> None:
    """The JSON comes last: a folder that has it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; save into a new folder")
    experience.snapshot().save(folder / EXPERIENCE)
    columns = [list(state.prompts), [prompt.tolist() for prompt in state.prompts.values()]]
    pq.write_table(pa.table(columns, schema=_SCHEMA), folder / _PROMPTS, compression="zstd", write_page_checksum=True)
    content = {"format": 1, "settings": state.settings, "generator": dict(state.generator), "step": state.step}
    replace_text(folder / _STATE, json.dumps(content) + "\n")


def read(folder: Path) -> State:
    """Raises CheckpointError where a file is missing, damaged, or of another kind."""
    path = folder / _STATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        table = pq.read_table(folder / _PROMPTS, page_checksum_verification=True)
        prompts = [prompt.values.to_numpy() for prompt in table.column("prompt_ids")]
        ids = table.column("question_id").to_pylist()
        return State(content["settings"], content["generator"], content["step"], dict(zip(ids, prompts, strict=True)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename or folder}: not found; {folder} holds no saved buffer") from error
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); use an unchanged copy") from error
