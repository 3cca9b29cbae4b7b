"""The files of a bad step: of every process `rank_N.json` and `rank_N.safetensors`, and `rank_N.jsonl` with texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from exgrpo_kernels.reference import Objective
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.parts import Parts, UpdateGiven
from exgrpo_megatron.types import AnswerName, TrainSequence, UpdateResult
from exgrpo_megatron.versions import versions


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
    """Of each sequence, like `entropy`; empty where it raised."""
    entropy: list[NDArray[np.float32]]
    origins: list[Origin]


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


def write_part(
    folder: Path,
    parts: Parts,
    kept: Kept,
    step: int,
    updates: Sequence[tuple[UpdateGiven, UpdateResult | None]],
    origins: Mapping[int, Origin],
    random: Mapping[str, NDArray[np.uint8]],
) -> None:
    """This process's files; the first of each data-parallel rank has its share of the sequences."""
    comm = parts.comm
    rank = comm.rank * comm.members + comm.member
    name = f"rank_{rank:05d}"
    arrays: dict[str, NDArray[Any]] = dict(random)
    described = []
    for number, (given, result) in enumerate(updates):
        share = given.share if comm.member == 0 else []
        described.append(_described(given, result, share))
        arrays |= {f"update_{number}.{key}": value for key, value in _arrays(given, result, share).items()}
    save_file(arrays, folder / f"{name}.safetensors")
    texts = [
        {"update": number, "index": index, **asdict(origins.get(id(given.sequences[index].response_ids), Origin()))}
        for number, (given, _) in enumerate(updates)
        for index in (given.share if comm.member == 0 else [])
    ]
    replace_text(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in texts))
    content = {
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
    replace_text(folder / f"{name}.json", json.dumps(content, indent=1) + "\n")


def read_bad_step(folder: Path) -> BadStep:
    """Everything in the folder of a bad step.

    Raises:
        DataError: it is none, or one of its files is damaged.
    """
    try:
        parts = [_read(path) for path in sorted(folder.glob("rank_*.json"))]
        # Those of an earlier start of the run on more processes are left over.
        parts = [part for part in parts if part[0]["ranks"] > part[1] and part[0]["ranks"] == parts[0][0]["ranks"]]
        if not parts:
            raise DataError(f"{folder} is no folder of a bad step: it has no rank_00000.json")
        first = parts[0][0]
        present = {rank for _, rank, _, _ in parts}
        return BadStep(
            folder=folder,
            step=first["step"],
            reasons=list(dict.fromkeys(reason for content, *_ in parts for reason in content["reasons"])),
            traceback=next((content["traceback"] for content, *_ in parts if content["traceback"]), None),
            missing_ranks=[rank for rank in range(first["ranks"]) if rank not in present],
            weights_version=first["weights_version"],
            updates=[_update(number, parts) for number in range(len(first["updates"]))],
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{folder} is damaged: {error}") from error


_Part = tuple[dict[str, Any], int, dict[str, NDArray[Any]], list[dict[str, Any]]]
"""Contents of the JSON file, rank, arrays, texts."""


def _read(path: Path) -> _Part:
    texts = [json.loads(line) for line in path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    arrays = load_file(path.with_suffix(".safetensors"))
    return json.loads(path.read_text(encoding="utf-8")), int(path.stem.removeprefix("rank_")), arrays, texts


def _described(given: UpdateGiven, result: UpdateResult | None, share: Sequence[int]) -> dict[str, Any]:
    sequences = [given.sequences[index] for index in share]
    return {
        # As text where they are not finite, which JSON has no numbers for.
        "loss": None if result is None else str(result.loss),
        "grad_norm": None if result is None else str(result.grad_norm),
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


def _update(number: int, parts: Sequence[_Part]) -> KeptUpdate:
    common = parts[0][0]["updates"][number]
    rows: list[tuple[int, TrainSequence, Any, Any, Origin]] = []
    for content, _, arrays, texts in parts:
        named = {key: value for key, value in _of_update(arrays, number).items()}
        origins = {row["index"]: row for row in texts if row["update"] == number}
        rows += _rows(content["updates"][number]["sequences"], named, origins)
    rows.sort(key=lambda row: row[0])
    ran = common["loss"] is not None
    return KeptUpdate(
        loss=float(common["loss"]) if ran else None,
        grad_norm=float(common["grad_norm"]) if ran else None,
        skipped=common["skipped"],
        learning_rate=common["learning_rate"],
        objective=Objective(**common["objective"]),
        temperature=common["temperature"],
        micro_batch_entropy_coeff=common["micro_batch_entropy_coeff"],
        version=common["version"],
        sequences=[row[1] for row in rows],
        log_ratio=[row[2] for row in rows] if ran else [],
        entropy=[row[3] for row in rows] if ran else [],
        origins=[row[4] for row in rows],
    )


def _of_update(arrays: Mapping[str, NDArray[Any]], number: int) -> dict[str, NDArray[Any]]:
    prefix = f"update_{number}."
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _rows(
    described: Sequence[dict[str, Any]], arrays: Mapping[str, NDArray[Any]], origins: Mapping[int, dict[str, Any]]
) -> list[tuple[int, TrainSequence, Any, Any, Origin]]:
    """Of one rank: index, sequence, log-ratios and entropies of its tokens (None where it raised), origin."""
    prompts = _split(arrays.get("prompt_ids"), [row["prompt_tokens"] for row in described])
    lengths = [row["response_tokens"] for row in described]
    names = ("response_ids", "old_logprobs", "token_weights", "log_ratio", "entropy")
    pieces = {name: _split(arrays.get(name), lengths) for name in names}
    rows = []
    for place, row in enumerate(described):
        origin = dict(origins.get(row["index"], {}))
        sequence = TrainSequence(
            prompt_ids=prompts[place],
            response_ids=pieces["response_ids"][place],
            old_logprobs=pieces["old_logprobs"][place],
            advantage=row["advantage"],
            replayed=row["replayed"],
            policy_weight=row["policy_weight"],
            entropy_weight=row["entropy_weight"],
            token_weights=pieces["token_weights"][place],
            stored=None if row["stored"] is None else AnswerName(*row["stored"]),
        )
        known = {name: value for name, value in origin.items() if name not in ("update", "index")}
        rows.append((row["index"], sequence, pieces["log_ratio"][place], pieces["entropy"][place], Origin(**known)))
    return rows


def _split(values: NDArray[Any] | None, lengths: Sequence[int]) -> list[Any]:
    if values is None:
        return [None] * len(lengths)
    return np.split(values, np.cumsum(lengths)[:-1])
