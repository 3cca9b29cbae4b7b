"""What benchmarks/learning.py compares: a recipe with overrides, by task, in the order in which they are run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from learning_studies import Study

EVALUATE_EVERY = 256
"""Answers between evaluations."""


@dataclass(frozen=True)
class Task:
    """What all settings of a task have in common."""

    title: str
    overrides: tuple[str, ...]
    seeded: tuple[str, ...]
    """What a seed changes; {seed} and {far} (1000 + seed) are replaced."""
    cpu_marks_s: tuple[float, ...]
    """CPU seconds at which runs are compared."""
    level: float
    """The pass rate at T=1 whose cost is compared, beside half of it."""


TASKS = {
    "symbols": Task(
        "unknown symbols, 2 letters, 96 training questions, from 2 to 3% right",
        ("eval.num_tests_per_prompt=2",),
        (
            "grpo.seed={seed}",
            "data.train.generator_seed={far}",
            "data.train.generator_meaning_seed={seed}",
            "data.validation.generator_meaning_seed={seed}",
        ),
        (3.0, 5.0, 7.0),
        0.5,
    ),
    "arithmetic": Task(
        "chain arithmetic, 2 to 6 terms, 450 training questions, from about 20% right",
        (
            "loss_fn.entropy_coeff=0",
            "env.math.exact_text=true",  # every answer is a plain number, and no worker takes time that is not counted
            "env.math.require_literal=false",
            "eval.num_tests_per_prompt=4",
        ),
        ("grpo.seed={seed}", "data.train.generator_seed={far}"),
        (2.0, 4.0, 6.0),
        0.5,
    ),
}
# Held-out questions are graded strictly there too.
TASKS |= {
    f"symbols, luck {share:g}": replace(
        TASKS["symbols"],
        title=f"unknown symbols, where {share:.0%} of the wrong answers with the right end count as right",
    )
    for share in (0.25, 1.0)
}


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    task: str
    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    answers: int = 6144
    """How many are sampled."""
    group: str = "main"
    """Which picture it is in."""
    study: Study | None = None
    """What is changed for which there is no recipe key."""


def batch(prompts: int, members: int, lr: float) -> tuple[str, ...]:
    """Overrides for `prompts` questions of `members` answers, in one optimiser step."""
    return (
        f"grpo.num_prompts_per_step={prompts}",
        f"grpo.num_generations_per_prompt={members}",
        f"policy.train_global_batch_size={prompts * members}",
        f"policy.megatron_cfg.optimizer.lr={lr}",
    )


STEP = "symbols_replay_step.yaml"
GRPO = "symbols_grpo.yaml"
GROUPS = "symbols_exgrpo.yaml"
FROM_THE_START = ("experience.start_pass_rate=null", "experience.retire_from=never", "loss_fn.entropy_coeff=0")


def _ablation(name: str, *overrides: str) -> Setting:
    return Setting("symbols", f"replay step: {name}", STEP, tuple(overrides), 3072, "ablations")


def _step(key: str, value: object) -> str:
    return f"experience.replay_step.{key}={value}"


SYMBOLS = [
    Setting("symbols", "replay step", STEP, answers=3072),
    Setting("symbols", "GRPO B8 K4, lr 2e-4", GRPO),
    Setting("symbols", "GRPO B4 K4, lr 1e-4", GRPO, batch(4, 4, 1e-4)),
    Setting("symbols", "both, lr 1e-4", STEP, ("experience.strategy=both", *batch(4, 4, 1e-4)), 3072),
    Setting("symbols", "corrected", GROUPS),
    Setting("symbols", "paper", GROUPS, ("variant=paper",), 3072),
    Setting("symbols", "code", GROUPS, ("variant=code",), 3072),
    Setting("symbols", "GRPO B8 K8, lr 2e-4", GRPO, batch(8, 8, 2e-4)),
    Setting("symbols", "GRPO B4 K4, lr 1e-4, 2 epochs", GRPO, (*batch(4, 4, 1e-4), "grpo.num_iterations=2")),
    Setting("symbols", "GRPO B8 K4, lr 1e-4, 2 epochs", GRPO, (*batch(8, 4, 1e-4), "grpo.num_iterations=2")),
    Setting("symbols", "GRPO B4 K4, lr 5e-5", GRPO, batch(4, 4, 5e-5)),
]
ABLATIONS = [
    _ablation("f(w)", _step("shaping", "ratio")),
    _ablation("w clipped", _step("shaping", "clip")),
    _ablation("w", _step("shaping", "none")),
    _ablation("joint", _step("joint", "true")),
    _ablation("weight 1", _step("weight", "one")),
    _ablation("lowest entropy", _step("answer_choice", "lowest_mean_entropy")),
    _ablation("uniform questions", _step("bucket_weight", "uniform")),
    _ablation("size 1", _step("size", 1)),
    _ablation("size 4", _step("size", 4)),
    _ablation("2 steps, lr 1e-4", _step("num_steps", 2), *batch(4, 4, 1e-4)),
    Setting("symbols", "groups, f(w), from the start, lr 2e-4", GROUPS, (*FROM_THE_START, *batch(4, 4, 2e-4)), 3072,
            "ablations"),
    Setting("symbols", "groups, g(w), from the start, lr 2e-4", GROUPS,
            (*FROM_THE_START, *batch(4, 4, 2e-4), "experience.shaping=normalized_ratio"), 3072, "ablations"),
]  # fmt: skip
_CHAINS = batch(8, 8, 5e-5)
_CHAIN_STEP = (
    "experience.strategy=replay_step", "experience.retire_from=never", "experience.start_pass_rate=null",
    "experience.max_answers_per_question=16", "experience.replay_step.size=1",
)  # fmt: skip
ARITHMETIC = [
    Setting("arithmetic", "replay step", "quickstart.yaml", (*_CHAINS, *_CHAIN_STEP), 3072),
    Setting("arithmetic", "GRPO B8 K8, lr 5e-5", "quickstart_grpo.yaml", _CHAINS, 3072),
    Setting("arithmetic", "GRPO B8 K8, lr 1e-4", "quickstart_grpo.yaml", batch(8, 8, 1e-4), 3072),
    Setting("arithmetic", "replay step, lr 1e-4", "quickstart.yaml", (*batch(8, 8, 1e-4), *_CHAIN_STEP), 3072),
    Setting("arithmetic", "corrected", "quickstart.yaml", (*_CHAINS, "loss_fn.entropy_coeff=0.001"), 3072),
    Setting("arithmetic", "code", "quickstart.yaml", (*_CHAINS, "variant=code", "loss_fn.entropy_coeff=0.001"), 3072),
    Setting("arithmetic", "GRPO B4 K8, lr 5e-5", "quickstart_grpo.yaml", batch(4, 8, 5e-5), 3072),
]
SETTINGS = [*SYMBOLS, *ABLATIONS, *ARITHMETIC]
