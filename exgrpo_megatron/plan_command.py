"""The part of `exgrpo show` about many GPUs."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from exgrpo_megatron.config import ClusterConfig, Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.plan.known_models import KNOWN_MODELS, find_architecture
from exgrpo_megatron.plan.planner import GIB, check_fits, make_plan
from exgrpo_megatron.report.plan_tables import memory_table, plan_lines, ranks_table


def planned_processes(cluster: ClusterConfig, world_size: int | None) -> int | None:
    """The processes to plan for, None where neither recipe nor command line says.

    Raises:
        ConfigError: they say different numbers.
    """
    nodes, per_node = cluster.num_nodes, cluster.gpus_per_node
    meant = None if nodes is None and per_node is None else (nodes or 1) * (per_node or 1)
    if world_size is None or meant is None or world_size == meant:
        return world_size or meant
    if None in (nodes, per_node) and world_size % meant == 0:  # the other one is whatever is launched
        return world_size
    raise ConfigError(
        f"--world-size {world_size} is not cluster.num_nodes * cluster.gpus_per_node = {nodes or 1} * {per_node or 1} "
        f"= {meant}: a launch with so many would be refused; set both keys for it, or to null"
    )


def show_plan(config: Config, world_size: int, gpu_memory_gib: float, console: Console) -> None:
    """Print who shares what and what each GPU holds.

    Raises:
        ConfigError: it cannot be divided or does not fit, or the model is not known.
    """
    found = find_architecture(config.policy.model_name)
    if found is None:
        raise ConfigError(
            f"policy.model_name = {config.policy.model_name!r}: there is no such folder whose config.json could be "
            f"read, and its shape is not among the known ones ({', '.join(KNOWN_MODELS)})"
        )
    architecture, source = found
    plan = make_plan(config, architecture, world_size, int(gpu_memory_gib * GIB))
    console.print("", ranks_table(plan), "", memory_table(plan), "", sep="\n")
    for line in plan_lines(plan, source):
        console.print(escape(line), highlight=False)
    check_fits(plan, config)
