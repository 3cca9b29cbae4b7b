"""The files of a bad step: of every process `rank_N.json` and `rank_N.safetensors`, and `rank_N.jsonl` with texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.debug.content import RankContent, SequenceContent, TextPlace
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.types import AnswerName, TrainSequence

RECIPE, WEIGHTS = "recipe.yaml", "weights"


@dataclass(frozen=True)
class Origin:
    """Where a sequence comes from; the last four are known of members of the step's groups alone."""

    question_id: str = ""
    question: str = ""
    gold: str = ""
    answer: str = ""
    reward: float | None = None
    correct: bool | None = None
    stop_reason: str | None = None
    policy_version: int | None = None


@dataclass(frozen=True)
class Kept:
    """Why a step is kept, and what was known of it."""

    reasons: list[str]
    metrics: dict[str, float] = field(default_factory=dict)
    traceback: str | None = None
    start: str = ""
    """`RankContent.start`."""


@dataclass(frozen=True)
class KeptUpdate:
    """One optimiser step of a bad step, all ranks together, in the order of its sequences."""

    loss: float | None
    """As the run had it; None where it raised."""
    grad_norm: float | None
    skipped: bool | None
    learning_rate: float | None
    objective: Objective
    temperature: float
    micro_batch_entropy_coeff: float
    version: int
    """Of the weights before it."""
    sequences: list[TrainSequence]
    log_ratio: list[NDArray[np.float32]]
    """Of each sequence, like `entropy`; empty where it raised on a rank."""
    entropy: list[NDArray[np.float32]]
    origins: list[Origin]
    whole: bool
    """Whether the sequences of all ranks are there."""


@dataclass(frozen=True)
class BadStep:
    """What the files of a step hold."""

    folder: Path
    step: int
    reasons: list[str]
    traceback: str | None
    missing_ranks: list[int]
    """Processes that wrote nothing: they did not come that far."""
    weights_version: int | None
    """Of the weights in its folder, and after the step."""
    updates: list[KeptUpdate]


def read_bad_step(folder: Path) -> BadStep:
    """Everything in the folder of a bad step.

    Raises:
        DataError: it is none, or one of its files is damaged.
    """
    try:
        parts = [_read(path) for path in sorted(folder.glob("rank_*.json"))]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}") from error
    # Of an earlier start a rank's files may be left over, also on more processes.
    newest = max((part.content.start for part in parts), default="")
    parts = [part for part in parts if part.content.start == newest]
    parts = [part for part in parts if part.content.ranks > part.rank and part.content.ranks == parts[0].content.ranks]
    if not parts:
        raise DataError(f"{folder} is no folder of a bad step: it has no rank_00000.json")
    contents, present = [part.content for part in parts], {part.rank for part in parts}
    try:
        return BadStep(
            folder=folder,
            step=contents[0].step,
            reasons=list(dict.fromkeys(reason for content in contents for reason in content.reasons)),
            traceback=next((content.traceback for content in contents if content.traceback), None),
            missing_ranks=[rank for rank in range(contents[0].ranks) if rank not in present],
            weights_version=contents[0].weights_version,
            updates=[_update(number, parts) for number in range(max(len(content.updates) for content in contents))],
        )
    except (ValueError, KeyError) as error:
        raise DataError(f"{folder} is damaged: {error}") from error


@dataclass(frozen=True)
class _Part:
    """What one process wrote."""

    content: RankContent
    rank: int
    arrays: dict[str, NDArray[Any]]
    origins: dict[tuple[int, int], Origin]
    """By optimiser step and index."""

    @property
    def has_sequences(self) -> bool:
        """Whether it is the first of its data-parallel rank."""
        return self.rank % max(1, self.content.ranks // self.content.data_parallel_size) == 0


def _read(path: Path) -> _Part:
    try:
        rank = int(path.stem.removeprefix("rank_"))
        content = RankContent.model_validate(json.loads(path.read_text(encoding="utf-8")))
        # Only the line feed ends a row: a text may have other characters that end lines.
        lines = path.with_suffix(".jsonl").read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line) for line in lines if line]
        places = [TextPlace.model_validate(row) for row in texts]
        found = [_ORIGIN.validate_python(row) for row in texts]
        origins = {(place.update, place.index): origin for place, origin in zip(places, found, strict=True)}
        return _Part(content, rank, load_file(path.with_suffix(".safetensors")), origins)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise DataError(f"{path.parent} is damaged: {path.stem}: {reason}") from None
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise DataError(f"{path.parent} is damaged: {path.stem}: {error}") from error


_ORIGIN = TypeAdapter(Origin)
_Row = tuple[int, TrainSequence, Any, Any, Origin]
"""Index, sequence, log-ratios and entropies of its tokens (None where it raised), origin."""


def _update(number: int, parts: Sequence[_Part]) -> KeptUpdate:
    """A rank that raised early has fewer of them than others."""
    begun = [part for part in parts if number < len(part.content.updates)]
    done = [part for part in begun if part.content.updates[number].loss is not None]
    common = (done or begun)[0].content.updates[number]
    rows = [row for part in begun for row in _rows(number, part)]
    rows.sort(key=lambda row: row[0])
    ran = len(done) == len(begun)
    there = {part.content.data_parallel_rank for part in begun if part.has_sequences}
    return KeptUpdate(
        loss=common.loss,
        grad_norm=common.grad_norm,
        skipped=common.skipped,
        learning_rate=common.learning_rate,
        objective=common.objective,
        temperature=common.temperature,
        micro_batch_entropy_coeff=common.micro_batch_entropy_coeff,
        version=common.version,
        sequences=[row[1] for row in rows],
        log_ratio=[row[2] for row in rows] if ran else [],
        entropy=[row[3] for row in rows] if ran else [],
        origins=[row[4] for row in rows],
        whole=len(there) == parts[0].content.data_parallel_size,
    )


def _rows(number: int, part: _Part) -> list[_Row]:
    """Of one rank; ValueError where its arrays are not as long as its sequences."""
    update, prefix = part.content.updates[number], f"update_{number}."
    arrays = {name.removeprefix(prefix): value for name, value in part.arrays.items() if name.startswith(prefix)}
    needed = {"prompt_ids", "response_ids", "old_logprobs", *([] if update.loss is None else ["log_ratio", "entropy"])}
    if update.sequences and (missing := sorted(needed - arrays.keys())):
        raise ValueError(f"rank_{part.rank:05d}.safetensors lacks {prefix}{missing[0]}")
    lengths = [sequence.response_tokens for sequence in update.sequences]
    prompts = _split(arrays, "prompt_ids", [sequence.prompt_tokens for sequence in update.sequences])
    names = ("response_ids", "old_logprobs", "token_weights", "log_ratio", "entropy")
    pieces = {name: _split(arrays, name, lengths) for name in names}
    rows = []
    for place, described in enumerate(update.sequences):
        own = {name: values[place] for name, values in pieces.items()}
        origin = part.origins.get((number, described.index), Origin())
        rows.append(
            (described.index, _sequence(described, prompts[place], own), own["log_ratio"], own["entropy"], origin)
        )
    return rows


def _sequence(described: SequenceContent, prompt_ids: Any, own: Mapping[str, Any]) -> TrainSequence:
    return TrainSequence(
        prompt_ids=prompt_ids,
        response_ids=own["response_ids"],
        old_logprobs=own["old_logprobs"],
        advantage=described.advantage,
        replayed=described.replayed,
        policy_weight=described.policy_weight,
        entropy_weight=described.entropy_weight,
        token_weights=own["token_weights"],
        stored=None if described.stored is None else AnswerName(*described.stored),
    )


def _split(arrays: Mapping[str, NDArray[Any]], name: str, lengths: Sequence[int]) -> list[Any]:
    """An array cut into those of the sequences; of one that is not there, None for each."""
    values = arrays.get(name)
    if values is None:
        return [None] * len(lengths)
    if values.shape != (sum(lengths),):
        raise ValueError(f"{name} of a rank has shape {values.shape}, its sequences {sum(lengths)} tokens")
    return np.split(values, np.cumsum(lengths)[:-1])
