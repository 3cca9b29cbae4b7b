"""Writes the files of a bad step, each whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from exgrpo_megatron.debug.files import RECIPE, WEIGHTS, Kept, Origin
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.parts import Parts, UpdateGiven
from exgrpo_megatron.recipe import dump_recipe
from exgrpo_megatron.types import TrainSequence, UpdateResult
from exgrpo_megatron.versions import versions


def remove_step(folder: Path) -> None:
    """Remove what an earlier start kept of the same step; other files in `folder` stay. Raises OSError."""
    for path in [*folder.glob("rank_*"), *folder.glob(f"{RECIPE}*")]:
        path.unlink()
    remove_weights(folder)


def remove_weights(folder: Path) -> None:
    """The same of the weights alone; several processes may do it at once. Raises UserError."""
    shutil.rmtree(folder / WEIGHTS, ignore_errors=True)
    if (folder / WEIGHTS).exists():
        raise UserError(f"{folder / WEIGHTS}, which an earlier start left, cannot be removed")


def write_part(
    folder: Path,
    parts: Parts,
    kept: Kept,
    step: int,
    updates: Sequence[tuple[UpdateGiven, UpdateResult | None]],
    origins: Mapping[int, Origin],
    random: Mapping[str, NDArray[np.uint8]],
) -> None:
    """This process's files and the recipe; the first of each data-parallel rank has its share of the sequences.

    Raises:
        UserError, OSError: one of them cannot be written.
    """
    comm = parts.comm
    rank = comm.rank * comm.members + comm.member
    name = f"rank_{rank:05d}"
    # Any process may be the only one that raises, so each brings the recipe; to the others' it is equal.
    replace_text(folder / f"{RECIPE}.{rank:05d}", dump_recipe(parts.config))
    os.replace(folder / f"{RECIPE}.{rank:05d}", folder / RECIPE)
    arrays: dict[str, NDArray[Any]] = dict(random)
    described = []
    for number, (given, result) in enumerate(updates):
        share = given.share if comm.member == 0 else []
        described.append(_described(given, result, share))
        arrays |= {f"update_{number}.{key}": value for key, value in _arrays(given, result, share).items()}
    replace_arrays(folder / f"{name}.safetensors", arrays)
    texts = [
        {"update": number, "index": index, **asdict(origins.get(id(given.sequences[index].response_ids), Origin()))}
        for number, (given, _) in enumerate(updates)
        for index in (given.share if comm.member == 0 else [])
    ]
    replace_text(folder / f"{name}.jsonl", "".join(_as_json(row) + "\n" for row in texts))
    content = {
        "start": kept.start,
        "step": step,
        "ranks": comm.world_size,
        "data_parallel_rank": comm.rank,
        "data_parallel_size": comm.size,
        "seed": parts.config.grpo.seed,
        "reasons": kept.reasons,
        "traceback": kept.traceback,
        "metrics": kept.metrics,
        "weights_version": parts.policy.version,
        "made_with": versions(),
        "updates": described,
    }
    replace_text(folder / f"{name}.json", _as_json(content, indent=1) + "\n")


def replace_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """`replace_text` of a safetensors file. Raises UserError."""
    aside = path.with_name(path.name + ".new")
    try:
        save_file(arrays, aside)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error}") from error


def _as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    """With numbers that are not finite, which JSON has none for, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _described(given: UpdateGiven, result: UpdateResult | None, share: Sequence[int]) -> dict[str, Any]:
    sequences = [given.sequences[index] for index in share]
    return {
        "loss": None if result is None else result.loss,
        "grad_norm": None if result is None else result.grad_norm,
        "skipped": None if result is None else result.skipped,
        "learning_rate": None if result is None else result.learning_rate,
        "lr_multiplier": given.lr_multiplier,
        "objective": asdict(given.objective),
        "temperature": given.temperature,
        "micro_batch_entropy_coeff": given.micro_batch_entropy_coeff,
        "version": given.version,
        "sequences": [
            {
                "index": index,
                "prompt_tokens": len(sequence.prompt_ids),
                "response_tokens": len(sequence.response_ids),
                "advantage": sequence.advantage,
                "replayed": sequence.replayed,
                "policy_weight": sequence.policy_weight,
                "entropy_weight": sequence.entropy_weight,
                "stored": None if sequence.stored is None else list(sequence.stored),
            }
            for index, sequence in zip(share, sequences, strict=True)
        ],
    }


def _arrays(given: UpdateGiven, result: UpdateResult | None, share: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Those of all sequences of a share, one behind the other."""
    if not share:
        return {}
    sequences = [given.sequences[index] for index in share]
    found = {
        "prompt_ids": np.concatenate([sequence.prompt_ids for sequence in sequences]),
        "response_ids": np.concatenate([sequence.response_ids for sequence in sequences]),
        "old_logprobs": np.concatenate([sequence.old_logprobs for sequence in sequences]),
    }
    if any(sequence.token_weights is not None for sequence in sequences):
        found["token_weights"] = np.concatenate([_token_weights(sequence) for sequence in sequences])
    if result is not None:
        terms = result.terms
        found |= {"log_ratio": terms.log_ratio, "entropy": terms.entropy, "clipped": terms.clipped}
        found["logprobs"] = found["old_logprobs"] + terms.log_ratio
        found["advantage"] = terms.advantage
    return found


def _token_weights(sequence: TrainSequence) -> NDArray[np.float32]:
    given = sequence.token_weights
    return np.ones(len(sequence.response_ids), np.float32) if given is None else given
