"""Megatron models that load what `convert` wrote and save what it reads; run by test_conversion_layouts.py under
`launch`.

Arguments: folder with MODEL/{hf,torch_dist,nemo2} for each model, folder to save to, and as JSON {layout:
{"megatron_cfg": ..., "saved": [model, ...]}}. Every model is loaded on every layout and compared with the one that is
made from the Hugging Face folder; those of "saved" also from nemo2 (if it is there), and they are saved by Megatron's
own writers to OUT/LAYOUT/MODEL/{torch_dist,legacy}; a "saved_as" may name one of the two.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from exgrpo_megatron.config import MegatronConfig, PolicyConfig
from exgrpo_megatron.policy import backend
from exgrpo_megatron.policy.distributed import lay_out
from exgrpo_megatron.policy.model import ResponseModel, load_model


def main(models: Path, out: Path, layouts: dict[str, dict[str, Any]]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
    backend.install()
    for name, case in layouts.items():
        sys.stdout.write(f"{name}\n")
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
        comm = lay_out(MegatronConfig(**case["megatron_cfg"]), seed=0)
        for model in sorted(path.name for path in models.iterdir()):
            target = out / name / model if model in case["saved"] else None
            on_layout(models / model, case["megatron_cfg"], target, case.get("saved_as"))
        comm.barrier()
        comm.shutdown()


def on_layout(folder: Path, layout: dict[str, Any], out: Path | None, saved_as: str | None) -> None:
    policy = PolicyConfig(model_name=str(folder / "hf"), megatron_cfg=layout, max_total_sequence_length=32)
    chunks, _ = load_model(folder / "hf", policy)
    expected = [{name: value.clone() for name, value in chunk.named_parameters()} for chunk in chunks]
    kinds = {"torch_dist/release": ""}
    if out is not None and (folder / "nemo2").exists():
        kinds["nemo2/weights"] = "module."
    for kind, prefix in kinds.items():
        load(folder / kind, chunks, prefix)
        for number, chunk in enumerate(chunks):
            for name, value in chunk.named_parameters():
                assert torch.equal(value, expected[number][name]), f"{folder.name} {kind} {layout}: {name}"
    if out is not None and saved_as != "legacy":
        save_distributed(out / "torch_dist", chunks)
    if out is not None and saved_as != "torch_dist":
        save_legacy(out / "legacy", chunks, layout)


def load(folder: Path, chunks: list[ResponseModel], prefix: str) -> None:
    """As Megatron-LM does, into parameters that hold nothing right."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    wanted = {f"model{number}": chunk.sharded_state_dict(prefix=prefix) for number, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load(wanted, str(folder))
    for number, chunk in enumerate(chunks):
        state = {name.removeprefix(prefix): value for name, value in loaded[f"model{number}"].items()}
        chunk.load_state_dict(state)


def save_distributed(root: Path, chunks: list[ResponseModel]) -> None:
    folder = root / "iter_0000012"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("12")
    dist.barrier()
    state = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    arguments = Namespace(num_layers=chunks[0].config.num_layers, attention_backend=chunks[0].config.attention_backend)
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    dist_checkpointing.save(state | {"args": arguments, "iteration": 12}, str(folder), strategy)


def save_legacy(root: Path, chunks: list[ResponseModel], layout: dict[str, Any]) -> None:
    """The layout of Megatron-LM's `torch` format, by the state that its models give for it."""
    tp, pp = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    stage = f"_{pp:03d}" if layout.get("pipeline_model_parallel_size", 1) > 1 else ""
    folder = root / "iter_0000012" / f"mp_rank_{tp:02d}{stage}"
    if mpu.get_data_parallel_rank() == 0:
        folder.mkdir(parents=True)
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        models = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks, strict=True)}
        about = {"args": Namespace(num_layers=chunks[0].config.num_layers), "checkpoint_version": 3.0, "iteration": 12}
        torch.save(about | models, folder / "model_optim_rng.pt")
        (root / "latest_checkpointed_iteration.txt").write_text("12")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
