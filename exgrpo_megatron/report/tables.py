"""The tables of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from exgrpo_megatron.config import VARIANTS, Config
from exgrpo_megatron.config.whole import fill_variant
from exgrpo_megatron.evaluation_request import QuestionsOf
from exgrpo_megatron.recipe import changed_keys
from exgrpo_megatron.recipe_options import Option
from exgrpo_megatron.recipe_table import derived_table
from exgrpo_megatron.recipe_yaml import yaml_text
from exgrpo_megatron.report.summary import categories, headline_words

WIDE_ENOUGH_FOR_A_TABLE = 120
"""Columns; the keys alone take 48."""


def numbers_table(config: Config, data_parallel_size: int) -> Table:
    """What the recipe's numbers mean, on so many ranks."""
    table = Table(title="What the numbers mean", show_header=False, title_justify="left", box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in derived_table(config, data_parallel_size):
        table.add_row(name, escape(value))
    return table


def variant_table(config: Config) -> Table:
    """Every switch on which the paper and its code differ: the value in force, and those of the other variants; without
    those of experience where it is off."""
    table = Table(title=f"Variant: {config.variant}", title_justify="left", box=None, pad_edge=False)
    table.add_column("switch", no_wrap=True)
    table.add_column("in force", style="bold", no_wrap=True)
    table.add_column("elsewhere", overflow="fold")
    for name, value in config.variant_table().items():
        if name.startswith("experience.") and not config.experience.enabled:
            continue
        others = {variant: choice for variant, choice in VARIANTS[name].items() if choice != value}
        elsewhere = ", ".join(f"{variant}: {yaml_text(choice)}" for variant, choice in others.items())
        table.add_row(name, yaml_text(value), elsewhere)
    return table


def idle_experience(config: Config) -> str | None:
    """Which keys of `experience:` are at other values than by default and do nothing, because it is off; None: none.

    They are accepted, so that `experience.enabled=false` alone makes any recipe the on-policy one.
    """
    if config.experience.enabled:
        return None
    chosen = {"enabled": False, "strategy": config.experience.strategy}
    filled = fill_variant({"variant": config.variant, "experience": chosen})["experience"]
    default = type(config.experience).model_validate(filled)
    changed = changed_keys(default.model_dump(mode="json"), config.experience.model_dump(mode="json"), "experience.")
    keys = [line.partition(":")[0] for line in changed]
    if config.experience.strategy != "exgrpo":
        keys.insert(0, "experience.strategy")
    if not keys:
        return None
    return f"experience.enabled = false, so these keys of the recipe have no effect: {', '.join(keys)}"


def options_view(options: Sequence[Option], width: int) -> RenderableType:
    """Every recipe key, for a terminal of so many columns: a table, or a paragraph a key where that is too narrow."""
    if width < WIDE_ENOUGH_FOR_A_TABLE:
        return Group(*(_paragraph(option) for option in options))
    table = Table(title="Recipe keys", title_justify="left", box=None, pad_edge=False)
    table.add_column("key", no_wrap=True, style="bold")
    table.add_column("default [unit]", overflow="fold", max_width=24)
    table.add_column("meaning", overflow="fold")
    for option in options:
        table.add_row(option.name, escape(_default(option)), escape(option.meaning))
    return table


def option_line(option: Option) -> str:
    """A recipe key in one line, to search in."""
    return f"{option.name} = {_default(option)}: {option.meaning}"


def evaluation_table(
    metrics: Mapping[str, float], num_questions: int, temperature: float, questions: QuestionsOf
) -> Table:
    """Pass rates of one evaluation, over all questions and by category."""
    title = "held-out pass rate" if questions is QuestionsOf.validation else "training pass rate"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("questions")
    words = headline_words(temperature)
    for word in words.values():
        table.add_column(word, justify="right", style="bold")
    for label, ending in [
        (f"all {num_questions}", ""),
        *((escape(name), f"/{name}") for name in categories(metrics)),
    ]:
        values = [metrics.get(f"validation/{name}{ending}") for name in words]
        table.add_row(label, *("-" if value is None else f"{value:.1%}" for value in values))
    return table


def _paragraph(option: Option) -> RenderableType:
    return Group(
        f"[bold]{option.name}[/] = {escape(_default(option))}", Padding(escape(option.meaning), pad=(0, 0, 0, 4))
    )


def _default(option: Option) -> str:
    return f"{option.default} [{option.unit}]" if option.unit else option.default
