"""Real models on several layouts, one after the other; run by test_plan.py under `launch` with 4 processes.

Arguments: folder with the model folders. Every process compares its groups and allocations with the plan.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "policy"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "plan"))

from allocations import allocated, planned
from policy_models import make_actor

from exgrpo_megatron.config import ClusterConfig, MegatronConfig, PolicyConfig
from exgrpo_megatron.plan.ranks import Kind, lay_out
from exgrpo_megatron.policy.distributed import DataParallel, initialize

ZERO = {"optimizer": {"use_distributed_optimizer": True}}
OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
UNEVEN = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}
LAYOUTS: list[tuple[dict[str, Any], str, str]] = [
    ({"tensor_model_parallel_size": 2, "context_parallel_size": 2} | ZERO, "qwen3", "bfloat16"),
    (UNEVEN | ZERO | OVERLAP, "qwen2", "bfloat16"),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2} | ZERO | OVERLAP,
        "qwen3",
        "float32",
    ),
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, "qwen2", "float32"),
]


def main(models: Path) -> None:
    # A process may join its group only once; Megatron's groups inside it are laid out anew for each layout.
    comm = initialize(PolicyConfig(model_name="unused"), ClusterConfig(), seed=0)
    for keys, family, precision in LAYOUTS:
        layout = MegatronConfig(**keys)
        mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
        )
        check(models / family, precision, layout, DataParallel())
    comm.barrier()
    comm.shutdown()


def check(model: Path, precision: str, layout: MegatronConfig, comm: DataParallel) -> None:
    ranks, mine = lay_out(comm.world_size, layout), dist.get_rank()
    groups: dict[Kind, dist.ProcessGroup] = {
        "tensor": mpu.get_tensor_model_parallel_group(),
        "context": mpu.get_context_parallel_group(),
        "data": mpu.get_data_parallel_group(),
        "pipeline": mpu.get_pipeline_model_parallel_group(),
    }
    for kind, group in groups.items():
        (expected,) = [ranks_ for ranks_ in ranks.groups(kind) if mine in ranks_]
        assert dist.get_process_group_ranks(group) == expected, (kind, expected)
    actor = make_actor(model, comm, precision=precision, megatron_cfg=layout)
    weights, gradients, optimizer = allocated(actor)
    # Of the ranks that share an optimizer's state the plan names the one with the most; the last has the padding.
    most = torch.tensor(optimizer)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mpu.get_data_parallel_group(with_context_parallel=True))
    found = weights, gradients, int(most)
    expected = planned(actor, layout, ranks, mpu.get_pipeline_model_parallel_rank())
    assert found == expected, (layout, found, expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
