"""What goes beyond the replay step, as settings of benchmarks/learning.py; docs/learning.md says what was found."""

from __future__ import annotations

from learning_settings import GRPO, STEP, Setting, batch
from learning_studies import Study


def _further(name: str, *overrides: str, study: Study | None = None, recipe: str = STEP) -> Setting:
    return Setting("symbols", f"further: {name}", recipe, tuple(overrides), 3072, "further", study)


def _luck(name: str, *overrides: str, recipe: str = STEP, **study: object) -> Setting:
    return _further(f"luck, {name}", *overrides, study=Study(last_digit=True, **study), recipe=recipe)


FURTHER = [
    _luck("replay step"),
    _luck("GRPO", recipe=GRPO),
    _further("half from unsolved", study=Study(unsolved_share=0.5)),
    _luck("confirmed twice", confirmed="twice"),
    _further("stored wrong answers, at most -.1", study=Study(wrong_cap=0.1)),
    _further("age at most 48 steps", study=Study(max_age=48)),
    _further("half of what is stored", study=Study(stored_share=0.5)),
    _luck("most confirmed", confirmed="most"),
    _luck("lowest entropy", "experience.replay_step.answer_choice=lowest_mean_entropy"),
    _further("entropy bonus .02, unsolved only", "loss_fn.entropy_coeff=0.02", study=Study(entropy_of_unsolved=True)),
    _luck("agreement", "experience.replay_step.answer_choice=agreement"),
    _further("stored wrong answers, at most -1", study=Study(wrong_cap=1.0)),
    _further("temperature 1.3", "policy.generation.temperature=1.3"),
    _further("entropy bonus .005", "loss_fn.entropy_coeff=0.005"),
    _further("B2 K8", *batch(2, 8, 2e-4)),
    _further("B16 K8, 8 replay steps of 32", *batch(16, 8, 2e-4), "experience.replay_step.num_steps=8",
             "experience.replay_step.size=0.25"),
]  # fmt: skip
