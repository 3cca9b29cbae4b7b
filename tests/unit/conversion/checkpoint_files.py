"""Checkpoints of formats that `convert` reads and does not write, made by torch and by hand."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.mapping import EMBEDDING, OUTPUT_LAYER, hf_names, megatron_names, pad_vocab, shard, to_megatron


def megatron_weights(arch: Architecture, tensors: dict[str, Tensor], rows: int = 64) -> dict[str, Tensor]:
    """Whole parameters by global name, the vocabulary padded to `rows`."""
    whole = {
        name: to_megatron(arch, name, [tensors[part] for part in hf_names(arch, name)]) for name in megatron_names(arch)
    }
    padded = {name: pad_vocab(whole[name], rows) for name in (EMBEDDING, OUTPUT_LAYER) if name in whole}
    return whole | padded


def write_bin(folder: Path, tensors: dict[str, Tensor], files: int = 1) -> None:
    """`pytorch_model.bin`, or several and their index."""
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin" for number in range(files)]
    placed = {name: names[index % files] for index, name in enumerate(tensors)}
    for file in names:
        torch.save({name: tensors[name] for name in tensors if placed[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def write_by_torch(folder: Path, weights: dict[str, Tensor], *, stacked: bool, prefix: str = "") -> None:
    """A distributed checkpoint by torch's own writer, one piece a key; layers one by one, or stacked in whole."""
    state: dict[str, Any] = {}
    for name, tensor in weights.items():
        parts = name.split(".", 3)
        if stacked and name.startswith("decoder.layers."):
            state.setdefault(f"{prefix}decoder.layers.{parts[3]}", []).append(tensor)
        else:
            state[prefix + name] = tensor
    state = {key: torch.stack(value) if isinstance(value, list) else value for key, value in state.items()}
    # What else may be in one: objects, and states of the optimizer.
    state |= {"rng_state": [1, 2], f"optimizer.state.exp_avg.{prefix}{EMBEDDING}": torch.ones(3)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def write_legacy(
    folder: Path,
    arch: Architecture,
    weights: dict[str, Tensor],
    *,
    tensor_parallel: int,
    stages: list[list[int]],
    arguments: dict[str, Any] | None = None,
    version: float = 3.0,
) -> None:
    """One file a rank; `stages` has for each stage the number of layers of each of its chunks, in the order of the
    model: first all stages' first chunks."""
    first = 0
    chunks: dict[tuple[int, int], range] = {}
    for chunk in range(len(stages[0])):
        for stage, counts in enumerate(stages):
            chunks[stage, chunk] = range(first, first + counts[chunk])
            first += counts[chunk]
    for tp in range(tensor_parallel):
        for stage, counts in enumerate(stages):
            rank = folder / (f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if len(stages) > 1 else ""))
            rank.mkdir(parents=True)
            models = {
                "model" + (str(chunk) if len(counts) > 1 else ""): _chunk(
                    arch, weights, tensor_parallel, tp, chunks[stage, chunk],
                    is_first=stage == chunk == 0,
                    is_last=(stage, chunk) == (len(stages) - 1, len(counts) - 1),
                )
                for chunk in range(len(counts))
            }  # fmt: skip
            about = {"args": Namespace(**arguments or {}), "checkpoint_version": version, "iteration": 7}
            torch.save(about | models, rank / "model_optim_rng.pt")


def _chunk(
    arch: Architecture,
    weights: dict[str, Tensor],
    tensor_parallel: int,
    tp: int,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        part = shard(name, tensor, tensor_parallel, tp).clone()
        if name.startswith("decoder.layers."):
            layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if int(layer) in layers:
                found[f"decoder.layers.{int(layer) - layers[0]}.{rest}"] = part
        elif (is_first and name == EMBEDDING) or (is_last and name != EMBEDDING):
            found[name] = part
    if is_last and arch.tied and not is_first:
        # With several stages the last one of a tied model has a copy of the embedding.
        found[OUTPUT_LAYER] = shard(EMBEDDING, weights[EMBEDDING], tensor_parallel, tp).clone()
    return found | {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(1)}
