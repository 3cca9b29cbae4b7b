"""The README.md of an exported model: what it is, how it was trained, on what, and how well it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from exgrpo_megatron.config import VARIANTS, Config
from exgrpo_megatron.recipe import dump_recipe, to_show
from exgrpo_megatron.recipe_table import derived_table
from exgrpo_megatron.recipe_yaml import yaml_text
from exgrpo_megatron.report.summary import categories, headline_words
from exgrpo_megatron.versions import versions

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- exgrpo
- grpo
- reinforcement-learning
---
"""


@dataclass(frozen=True)
class TrainedModel:
    """What the card says of a model."""

    config: Config
    step: int | None
    """Steps trained; None for supervised fine-tuning."""
    data: Mapping[str, Any]
    """`QuestionSet.record` by `train` and `validation`."""
    fingerprint: str
    """Of the training questions."""
    records: Sequence[Mapping[str, float]] = ()
    """The run's metrics, one a step."""
    evaluations: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of `exgrpo eval` of the same weights, by the name of the file."""
    logged: Mapping[str, str] = field(default_factory=dict)
    """Where other tools have the run, by their names."""


def model_card(model: TrainedModel, checked: str) -> str:
    """The whole file, in Markdown. `checked`: how the export was compared."""
    return (
        "\n".join([_HEAD, *_opening(model, checked), *_results(model), *_data(model), *_training(model), *_versions()])
        + "\n"
    )


def _opening(model: TrainedModel, checked: str) -> Iterable[str]:
    base = model.config.policy.model_name
    name = base if base.startswith("embedded:") else PurePath(base).name
    how = "supervised fine-tuning" if model.step is None else f"{model.step} steps of ExGRPO (arXiv:2510.02245)"
    yield f"# {name}, after {how}"
    yield ""
    yield f"Base model: `{base}`. The export was checked before it was put here: {checked}."
    yield ""
    for tool, where in model.logged.items():
        yield f"The run in {tool}: {where}"
        yield ""


def _results(model: TrainedModel) -> Iterable[str]:
    if model.step is None:
        return
    yield "## Pass rates on held-out questions"
    yield ""
    evaluated = [r for r in model.records if "validation/pass_rate_t1" in r and r["step"] <= model.step]
    columns = [(f"step {record['step']:.0f}", record) for record in (*evaluated[:1], *evaluated[1:][-1:])]
    columns += [(f"`exgrpo eval`, {name}", metrics) for name, metrics in model.evaluations.items()]
    if not columns:
        yield "None were measured."
        yield ""
        return
    yield from _pass_rates(model.config, columns)
    held_out = model.data.get("validation")
    asked = f"{held_out['questions']} questions" if held_out else "Held-out questions"
    yield ""
    yield (
        f"{asked}, {model.config.eval.num_tests_per_prompt} sampled answers each, graded by Math-Verify. "
        f"The weights here are those after step {model.step}; step 0 is before training."
    )
    yield ""


def _pass_rates(config: Config, columns: Sequence[tuple[str, Mapping[str, float]]]) -> Iterable[str]:
    words = headline_words(config.eval.temperature)
    shown = [(f"{title}, {word}", metrics, name) for name, word in words.items() for title, metrics in columns]
    yield _row(["questions", *(title for title, _, _ in shown)])
    yield _row(["---", *["---:"] * len(shown)])
    names = categories({key: value for _, metrics in columns for key, value in metrics.items()})
    for label, ending in [("all", ""), *((name, f"/{name}") for name in names)]:
        values = [metrics.get(f"validation/{name}{ending}") for _, metrics, name in shown]
        yield _row([label, *("-" if value is None else f"{value:.1%}" for value in values)])


def _data(model: TrainedModel) -> Iterable[str]:
    yield "## Data"
    yield ""
    yield _row(["", "source", "questions", "left out", "SHA-256 of the file", "fingerprint"])
    yield _row(["---"] * 6)
    for kind in ("train", "validation"):
        record = model.data.get(kind)
        if record:
            cells = [str(record[key]) for key in ("source", "questions", "left_out", "sha256")]
            yield _row([kind, *cells, f"`{record['fingerprint']}`"])
    if not model.data.get("train"):
        yield _row(["train", "not recorded", "-", "-", "-", f"`{model.fingerprint}`"])
    yield ""
    yield "A fingerprint is over ids, prompts' token ids and answers of the questions that were used, in order."
    yield ""


def _training(model: TrainedModel) -> Iterable[str]:
    config = model.config
    if model.step is not None:
        yield f"## Variant: {config.variant}"
        yield ""
        yield _row(["switch", "in force", "elsewhere"])
        yield _row(["---"] * 3)
        for name, value in config.variant_table().items():
            others = {variant: choice for variant, choice in VARIANTS[name].items() if choice != value}
            elsewhere = ", ".join(f"{variant}: {yaml_text(choice)}" for variant, choice in others.items())
            yield _row([f"`{name}`", yaml_text(value), elsewhere])
        yield ""
        yield "## What the numbers mean"
        yield ""
        yield _row(["", ""])
        yield _row(["---"] * 2)
        for name, value in derived_table(config):
            yield _row([name, value])
        yield ""
    yield "## Recipe"
    yield ""
    yield "```yaml"
    yield dump_recipe(to_show(config)).rstrip("\n")
    yield "```"
    yield ""


def _versions() -> Iterable[str]:
    yield "## Versions"
    yield ""
    yield "Of the program that exported: " + ", ".join(f"{name} {number}" for name, number in versions().items()) + "."


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
