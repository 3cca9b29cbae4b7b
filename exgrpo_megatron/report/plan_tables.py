"""The tables of `exgrpo show --world-size`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from exgrpo_megatron.plan.planner import GIB, Plan, StagePlan
from exgrpo_megatron.plan.ranks import ORDER

_SHOWN_GROUPS = 3


def ranks_table(plan: Plan) -> Table:
    """The ranks of every group."""
    ranks = plan.ranks
    table = _table(f"Ranks of {ranks.world_size} processes")
    for column in ("group", "ranks", "groups"):
        table.add_column(column, no_wrap=True)
    table.add_column("which", overflow="fold")
    for kind in ORDER:
        groups = ranks.groups(kind)
        shown = ", ".join(_group(group) for group in groups[:_SHOWN_GROUPS])
        more = ", ..." if len(groups) > _SHOWN_GROUPS else ""
        size = getattr(ranks, kind)
        table.add_row(f"{kind} parallel", str(size), str(len(groups)), f"{shown}{more}" if size > 1 else "-")
    return table


def memory_table(plan: Plan) -> Table:
    """Bytes of a GPU by kind, for the first, a middle and the last pipeline stage."""
    shown = _shown_stages(plan.stages)
    table = _table(f"Memory of a GPU in GiB, of {plan.gpu_bytes / GIB:g}")
    table.add_column("", no_wrap=True)
    for stage in shown:
        table.add_column(f"stage {stage.stage.index}", justify="right")
    for name, cell in _layout_rows():
        table.add_row(name, *(cell(stage) for stage in shown))
    for name, bytes_ in _memory_rows(plan):
        table.add_row(name, *(_gib(bytes_(stage)) for stage in shown))
    table.add_section()
    for phase in plan.peaks(shown[0]):
        table.add_row(f"peak of {phase}", *(_gib(plan.peaks(stage)[phase]) for stage in shown))
    table.add_row("to be used at most", *[_gib(plan.usable_bytes)] * len(shown), style="bold")
    return table


def plan_lines(plan: Plan, source: str) -> list[str]:
    """What the tables do not say: the model, micro-batches, experience."""
    experience, train = plan.experience, plan.train
    lines = [
        f"{plan.parameters:,} parameters in all, from {source}",
        f"an optimiser step has up to {plan.micro_batches} micro-batches on a data-parallel rank, of up to "
        f"{train.positions:,} positions on a rank, with a loss for up to {train.response_tokens:,}",
        f"rollouts: room for {plan.rollout.kv_tokens:,} positions in the KV cache",
    ]
    if experience.questions:
        lines.append(
            f"experience, in the machine's memory, at most: index {_gib(experience.index)} GiB on every process "
            f"({experience.questions:,} questions), answers {_gib(experience.table)} GiB on the first of each "
            f"data-parallel rank, and {_gib(experience.disk)} GiB on its disk ({experience.answers:,} in all, were "
            f"each right and of the greatest length)"
        )
    return lines


def _layout_rows() -> list[tuple[str, Callable[[StagePlan], str]]]:
    return [
        ("ranks", lambda stage: _group(list(stage.ranks))),
        ("layers", lambda stage: str(stage.stage.num_layers)),
        ("parameters of a rank", lambda stage: f"{stage.stage.elements:,}"),
    ]


def _memory_rows(plan: Plan) -> list[tuple[str, Callable[[StagePlan], int]]]:
    used, unused = ("recomputed", "all kept") if plan.recomputed else ("all kept", "recomputed")
    kept: Callable[[StagePlan], int] = lambda stage: stage.step.kept  # noqa: E731
    recomputed: Callable[[StagePlan], int] = lambda stage: stage.step.recomputed  # noqa: E731
    fp8: list[tuple[str, Callable[[StagePlan], int]]] = [
        ("FP8 copies of weights", lambda stage: stage.held.fp8_weights)
    ]
    return [
        ("weights", lambda stage: stage.held.weights),
        *(fp8 if any(stage.held.fp8_weights for stage in plan.stages) else []),
        ("gradients (float32)", lambda stage: stage.held.gradients),
        ("optimizer", lambda stage: stage.held.optimizer),
        (f"activations, {used}", recomputed if plan.recomputed else kept),
        (f"  (not in force: {unused})", kept if plan.recomputed else recomputed),
        ("logits and their gradients", lambda stage: stage.step.loss),
        ("rollout weights", lambda _: plan.rollout.weights),
        ("rollout KV cache", lambda _: plan.rollout.kv_cache),
    ]


def _shown_stages(stages: Sequence[StagePlan]) -> list[StagePlan]:
    """The first, the second (of the middle ones it has the most passes in flight) and the last."""
    return [stages[index] for index in sorted({0, min(1, len(stages) - 1), len(stages) - 1})]


def _group(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def _gib(bytes_: int) -> str:
    return f"{bytes_ / GIB:.2f}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)
