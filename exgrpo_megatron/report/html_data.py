"""Everything a report page shows, as plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from exgrpo_megatron import __version__
from exgrpo_megatron.config import VARIANTS, Config
from exgrpo_megatron.data.embedded_model import is_embedded
from exgrpo_megatron.data.questions import questions_as_written
from exgrpo_megatron.data.tokenizer import load_tokenizer
from exgrpo_megatron.errors import CheckpointError, ConfigError, DataError
from exgrpo_megatron.experience.history import FIELDS, HISTORY_FILE
from exgrpo_megatron.metrics import find_metric
from exgrpo_megatron.recipe import to_show
from exgrpo_megatron.recipe_table import derived_table
from exgrpo_megatron.recipe_yaml import yaml_text
from exgrpo_megatron.report.answer_texts import FoundTexts, answer_texts, experience_folders
from exgrpo_megatron.report.question_rows import (
    STATUSES,
    QuestionRow,
    replayed_serials,
    rows_from_checkpoint,
    rows_from_history,
)
from exgrpo_megatron.report.run_data import RunData
from exgrpo_megatron.report.summary import before_and_after
from exgrpo_megatron.types import Question

_MOST_POINTS = 2000
"""Of a series in the page: a longer one is thinned out evenly."""


@dataclass(frozen=True)
class PageData:
    """What the page's template writes, and what its script draws."""

    run: RunData
    cards: list[dict[str, str]]
    notes: list[str]
    """What the page leaves out, and why."""
    payload: dict[str, Any]


def page_data(run: RunData, folder: Path, max_answer_texts: int) -> PageData:
    """Collect it; what is missing or damaged beside recipe and metrics becomes a note.

    Raises:
        DataError: the history has a line that is none.
    """
    notes: list[str] = []
    simulated = (folder / "simulation.json").is_file()
    if simulated:
        notes.append("This run was simulated from pass rates: no model, no texts, and only questions that were tried.")
    known = {} if simulated else _known_questions(run.config, notes)
    rows = _question_rows(run, folder, known, notes)
    texts = _texts(run.config, folder, rows, max_answer_texts, notes) if not simulated else FoundTexts({}, 0)
    payload = {
        "run": {**_run_facts(run), "simulated": simulated},
        "metrics": _metrics(run),
        "questions": _columns(rows),
        "statuses": list(STATUSES),
        "kinds": list(FIELDS),
        "events": [row.events for row in rows],
        "answers": {
            str(serial): [found.text, found.tokens, found.stored_step, _short(found.mean_logprob)]
            for serial, found in texts.texts.items()
        },
    }
    return PageData(run, _cards(run), notes, payload)


def recipe_rows(config: Config) -> list[tuple[str, str]]:
    """Every key of the recipe with its value."""
    return list(_flat(to_show(config).model_dump(mode="json"), ""))


def variant_rows(config: Config) -> list[tuple[str, str, str]]:
    """Switch, value in force, and the values of the other variants where they differ."""
    return [
        (
            name,
            yaml_text(value),
            ", ".join(
                f"{variant}: {yaml_text(choice)}" for variant, choice in VARIANTS[name].items() if choice != value
            ),
        )
        for name, value in config.variant_table().items()
    ]


def number_rows(config: Config) -> list[tuple[str, str]]:
    """What the recipe's numbers mean, on one rank."""
    return derived_table(config)


def _run_facts(run: RunData) -> dict[str, Any]:
    config, last = run.config, int(run.records[-1]["step"])
    return {
        "name": run.name,
        "variant": config.variant if config.experience.enabled else "on-policy, no replay",
        "step": last,
        "steps": config.grpo.max_num_steps,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "group_size": config.grpo.num_generations_per_prompt,
        "batch": config.grpo.num_prompts_per_step,
        "replay": config.experience.enabled,
        "replay_ratio": config.experience.replay_ratio,
        "replay_start": run.replay_start,
        "start_pass_rate": config.experience.start_pass_rate if config.experience.enabled else None,
        "temperature": config.eval.temperature,
        "max_grad_norm": config.policy.max_grad_norm,
    }


def _metrics(run: RunData) -> dict[str, Any]:
    """By name: unit, meaning, steps and values."""
    names = dict.fromkeys(name for record in run.records for name in record if name != "step")
    return {name: _metric(run, name) for name in names}


def _metric(run: RunData, name: str) -> dict[str, Any]:
    known, series = find_metric(name), run.series(name)
    every = max(1, -(-len(series) // _MOST_POINTS))
    # Counted from the end, so that the newest value is always there.
    chosen = slice((len(series) - 1) % every, None, every)
    return {
        "unit": known.unit if known else "",
        "meaning": known.meaning if known else "",
        "steps": [int(step) for step in series.steps[chosen]],
        "values": [_short(value) for value in series.values[chosen].tolist()],
    }


def _known_questions(config: Config, notes: list[str]) -> dict[str, Question]:
    try:
        return {question.id: question for question in questions_as_written(config.data.train)}
    except (ConfigError, DataError) as error:
        notes.append(f"The texts of the questions are not shown: {error}")
        return {}


def _question_rows(run: RunData, folder: Path, known: Mapping[str, Question], notes: list[str]) -> list[QuestionRow]:
    history = folder / HISTORY_FILE
    if history.is_file():
        return rows_from_history(history, known)
    notes.append(f"There is no {HISTORY_FILE}, so what happened to a question step by step is not shown.")
    for experience in experience_folders(folder, run.config)[:1]:
        try:
            rows = rows_from_checkpoint(experience, run.config.grpo.num_generations_per_prompt, known)
        except CheckpointError as error:
            notes.append(f"Its newest checkpoint cannot be read: {error}")
        else:
            notes.append(f"Buckets and stored answers are those of checkpoint {experience.parent.name}.")
            return rows
    return [QuestionRow(name, question) for name, question in known.items()]


def _texts(config: Config, folder: Path, rows: Sequence[QuestionRow], most: int, notes: list[str]) -> FoundTexts:
    """Texts of the answers replayed latest."""
    serials = replayed_serials(rows)
    wanted = serials[:most]
    if not wanted:
        return FoundTexts({}, 0)
    if len(serials) > most:
        notes.append(f"{len(serials)} answers were replayed; texts are looked for of the {most} replayed latest.")
    try:
        tokenizer = load_tokenizer(_tokenizer_folder(config, folder))
        folders = experience_folders(folder, config)
        found = answer_texts(folders, config.grpo.num_generations_per_prompt, wanted, tokenizer.decode)
    except (ConfigError, CheckpointError) as error:
        notes.append(f"The texts of replayed answers are not shown: {error}")
        return FoundTexts({}, 0)
    gone = len(wanted) - len(found.texts) - found.damaged
    if gone:
        notes.append(
            f"{gone} of {len(wanted)} replayed answers are in no checkpoint that is left (evicted, or their question "
            "was retired): they have no text here."
        )
    if found.damaged:
        notes.append(f"{found.damaged} replayed answers are damaged in the checkpoints.")
    return found


def _tokenizer_folder(config: Config, folder: Path) -> Path:
    if config.policy.tokenizer.name:
        return Path(config.policy.tokenizer.name)
    name = config.policy.model_name
    return folder / "model" if is_embedded(name) else Path(name)


def _columns(rows: Sequence[QuestionRow]) -> dict[str, list[Any]]:
    """A list a column, one entry a question."""
    questions = [row.question for row in rows]
    return {
        "id": [row.id for row in rows],
        "text": ["" if found is None or found.text == row.id else found.text
                 for row, found in zip(rows, questions, strict=True)],
        "answer": ["" if found is None else found.answer for found in questions],
        "category": ["" if found is None or found.category is None else found.category for found in questions],
        "status": [STATUSES.index(row.status) for row in rows],
        "groups": [row.groups for row in rows],
        "rate": [round(row.right / row.answers, 4) if row.answers else None for row in rows],
        "last": [row.last for row in rows],
        "last_step": [row.last_step for row in rows],
        "stored": [row.stored for row in rows],
        "replays": [row.replays for row in rows],
        "ratio": [_short(row.ratio) for row in rows],
        "evicted": [row.evicted for row in rows],
        "retired_step": [row.retired_step for row in rows],
    }  # fmt: skip


def _cards(run: RunData) -> list[dict[str, str]]:
    """The figures at the head of the page."""
    before, after = before_and_after(run.records)
    cards = []
    for name, label in (("pass_rate_t1", f"held out, T={run.config.eval.temperature:g}"),
                        ("pass_rate_greedy", "held out, greedy")):  # fmt: skip
        key = f"validation/{name}"
        latest = after.get(key, before.get(key))
        if latest is not None:
            cards.append(_card(label, f"{latest:.1%}", f"{before[key]:.1%} before" if key in before and after else ""))
    last = _last_step(run)
    shown = [
        ("reward/pass_rate_fresh", "new answers correct", lambda value: f"{value:.1%}", "last step"),
        ("experience/replayed_questions", "replayed", lambda value: f"{value:.0f}", _share(run)),
        ("experience/buffer_questions", "questions in the buffer", lambda value: f"{value:,.0f}", _stored(last)),
        ("experience/retired", "questions retired", lambda value: f"{value:,.0f}", _left(last)),
        ("time/step_s", "seconds a step", lambda value: f"{value:.2f}", "last step"),
    ]
    return cards + [_card(label, form(last[name]), detail) for name, label, form, detail in shown if name in last]


def _share(run: RunData) -> str:
    return f"of {run.config.grpo.num_prompts_per_step}, last step"


def _stored(last: Mapping[str, float]) -> str:
    answers, size = last.get("experience/stored_answers"), last.get("experience/stored_bytes")
    if answers is None:
        return ""
    return f"{answers:,.0f} answers" + ("" if size is None else f", {size / 1e6:.1f} MB")


def _left(last: Mapping[str, float]) -> str:
    left = last.get("data/questions_left")
    return "" if left is None else f"{left:,.0f} left for an epoch"


def _last_step(run: RunData) -> Mapping[str, float]:
    trained = [record for record in run.records if "reward/pass_rate" in record]
    return trained[-1] if trained else {}


def _card(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _flat(section: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in section.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, yaml_text(value)))
    return rows


def _short(value: float) -> float | None:
    """Six digits; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
