"""A run's folder with a history, hostile question texts and a checkpoint, for the tests of the page."""

import json
from pathlib import Path

import numpy as np
from run_folder import RECIPE, write_run

from exgrpo_megatron.comm import SingleProcess
from exgrpo_megatron.config import ExperienceConfig
from exgrpo_megatron.data.embedded_model import materialize
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.history import HISTORY_FILE, Event, HistoryWriter
from exgrpo_megatron.types import Group, Question, Trajectory

HOSTILE = [
    "</script><script>document.documentElement.dataset.pwned = 'yes'</script>",
    "<img src=x onerror=\"document.documentElement.dataset.pwned = 'yes'\">",
    "quotes \" ' ` and & &lt; \\u003c \u2028 \u2029 <!--",
    "Übung: ∑ 数学 🧮 {{ 7 * 7 }}",
]
ANSWER = [7, 3, 8, 2]
"""Token ids of the stored answer."""


def write_page_run(folder: Path, num_questions: int = 200, checkpoint: bool = True) -> Path:
    """Questions q0 to q3 are `HOSTILE`; q0 was replayed and stays stored, q1 is retired, q2 was never right."""
    questions = folder.parent / f"{folder.name}-questions.jsonl"
    texts = [*HOSTILE, *(f"question {i}" for i in range(len(HOSTILE), num_questions))]
    rows = [{"id": f"q{i}", "q": text, "a": str(i), "c": f"c{i % 3}"} for i, text in enumerate(texts)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{path: {questions}, question_key: q, answer_key: a, id_key: id, category_key: c}}"
    recipe = RECIPE.replace("{generator: chain_arithmetic}", source)
    run = write_run(folder, num_steps=3, recipe=recipe)
    history = HistoryWriter(run / HISTORY_FILE)
    history.write(1, [
        Event("q0", "tried", count=2, of=8), Event("q0", "stored", answer=0), Event("q0", "stored", answer=1),
        Event("q1", "tried", count=7, of=8), Event("q1", "stored", answer=2), Event("q2", "tried", count=0, of=8),
    ])  # fmt: skip
    history.write(2, [
        Event("q0", "tried", count=5, of=8), Event("q0", "replayed", answer=0, mean_ratio=1.25, max_ratio=2.5),
        Event("q0", "evicted", answer=1, reason="max_answers_per_question"),
    ])  # fmt: skip
    history.write(3, [
        Event("q1", "tried", count=8, of=8), Event("q1", "replayed", answer=2, mean_ratio=0.5, max_ratio=1.0),
        Event("q1", "retired"),
    ])  # fmt: skip
    if checkpoint:
        _write_checkpoint(run / "checkpoints" / "step_000002")
        materialize("embedded:chain-qwen2", run / "model", 0)
    return run


def _write_checkpoint(folder: Path) -> None:
    """One stored answer, of q0, with serial 0."""
    buffer = ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), 8, SingleProcess())
    logprobs = np.full(len(ANSWER), -0.5, np.float32)
    right = Trajectory(np.array(ANSWER, np.int32), logprobs, 1.0, False, "stop", 0)
    wrong = Trajectory(np.array([5], np.int32), logprobs[:1], 0.0, False, "stop", 0)
    buffer.record([Group(Question("q0", np.zeros(1, np.int32), "0"), (right, *[wrong] * 7))], step=1, collect=True)
    buffer.snapshot().save(folder / "experience")
    (folder / "state.json").write_text('{"step": 2}')
