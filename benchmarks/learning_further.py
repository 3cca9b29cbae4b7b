"""What goes beyond the replay step, as settings of benchmarks/learning.py; docs/learning.md says what was found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from learning_run import Measured
from learning_settings import GRPO, STEP, Setting, batch
from learning_studies import Study

from exgrpo_megatron.report.seeds import markdown_table, mean_interval


def _further(name: str, *overrides: str, study: Study | None = None, recipe: str = STEP) -> Setting:
    return Setting("symbols", f"further: {name}", recipe, tuple(overrides), 3072, "further", study)


def _luck(name: str, *overrides: str, recipe: str = STEP, share: float = 0.25, **study: object) -> Setting:
    changed = Study(luck=share, **study)
    return Setting(f"symbols, luck {share:g}", name, recipe, tuple(overrides), 3072, "further", changed)


FURTHER = [
    _luck("replay step"),
    _luck("GRPO", recipe=GRPO),
    _further("half from unsolved", study=Study(unsolved_share=0.5)),
    _luck("newest", "experience.replay_step.answer_choice=newest"),
    _luck("most confirmed", confirmed="most"),
    _further("stored wrong answers, at most -.1", study=Study(wrong_cap=0.1)),
    _further("age at most 48 steps", study=Study(max_age=48)),
    _further("half of what is stored", study=Study(stored_share=0.5)),
    _further("B16 K8, 8 replay steps of 32", *batch(16, 8, 2e-4), "experience.replay_step.num_steps=8",
             "experience.replay_step.size=0.25"),
    _luck("confirmed twice", confirmed="twice"),
    _further("entropy bonus .02, unsolved only", "loss_fn.entropy_coeff=0.02", study=Study(entropy_of_unsolved=True)),
    _luck("age at most 48 steps", max_age=48),
    _further("GRPO B8 K4, temperature 1.3", "policy.generation.temperature=1.3", recipe=GRPO),
    _further("B2 K8", *batch(2, 8, 2e-4)),
    _further("temperature 1.6", "policy.generation.temperature=1.6"),
    _luck("agreement", "experience.replay_step.answer_choice=agreement"),
    _further("stored wrong answers, at most -1", study=Study(wrong_cap=1.0)),
    _luck("lowest entropy", "experience.replay_step.answer_choice=lowest_mean_entropy"),
    _further("temperature 1.3", "policy.generation.temperature=1.3"),
    _further("entropy bonus .005", "loss_fn.entropy_coeff=0.005"),
    _luck("replay step", share=1),
    _luck("GRPO", recipe=GRPO, share=1),
]  # fmt: skip


def noted_table(measured: Sequence[Measured]) -> str:
    """Markdown: of runs that were looked into, shares of lucky answers and of unsolved questions, by answers."""
    marks = (256, 1024, 2048, 3072)
    runs: dict[str, list[Measured]] = {}
    for run in measured:
        if run.noted:
            runs.setdefault(f"{run.task}: {run.setting}", []).append(run)
    columns = ["setting", "n", *(f"{title} at {mark}" for title in _NOTED.values() for mark in marks)]
    rows = []
    for name, listed in runs.items():
        found = [
            mean_interval([float(np.interp(mark, run.answers, run.noted[key])) for run in listed]).describe(2)
            if key in listed[0].noted
            else "-"
            for key in _NOTED
            for mark in marks
        ]
        rows.append([name, str(len(listed)), *found])
    return markdown_table(columns, rows) if rows else ""


_NOTED = {"lucky_new": "lucky of new right ones", "lucky_trained": "of replayed", "unsolved": "unsolved questions"}
