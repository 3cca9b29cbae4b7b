"""Several steps of the trainer with the embedded engine on the launched ranks; every process writes what it did.

They begin with experience from worked solutions, saved and taken in as two commands would. Arguments: a folder for the
run, the folder of a model that solves some of the questions, and keys of policy.megatron_cfg as JSON.
"""

import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from exgrpo_megatron import build, run_inputs
from exgrpo_megatron.config import Config
from exgrpo_megatron.data.chain_arithmetic import generate
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.prefill import load_prefill, record_solutions
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.rollout.protocol import RolloutEngine, SampledResponse, SampleRequest, SamplingParams
from exgrpo_megatron.trainer import StepResult, Trainer

STEPS = 4
SOLUTIONS = "questions.jsonl"


def write_solutions(folder: Path) -> None:
    """64 questions; every third of their solutions is wrong, and every eighth question is there twice."""
    chains = generate(64, 3, [2, 3], held_out=False)
    solutions = [(c, "\\boxed{999}" if index % 3 == 0 else c.worked) for index, c in enumerate(chains)]
    solutions += [(c, f"\\boxed{{{c.answer}}}") for c in chains[::8]]
    rows = [
        {"question": c.text, "answer": c.answer, "terms": c.num_terms, "solution": solution}
        for c, solution in solutions
    ]
    (folder / SOLUTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder: Path, model: Path, layout: dict[str, Any]) -> Config:
    return parse_recipe(
        {
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "seed": 5},
            "data": {
                "train": {"path": str(folder / SOLUTIONS), "solution_key": "solution", "category_key": "terms"},
                "validation": {"generator": "chain_arithmetic", "generator_size": 6},
                "max_input_seq_length": 32,
            },
            "policy": {
                "model_name": str(model),
                "train_global_batch_size": 16,
                "train_micro_batch_size": 8,
                "max_total_sequence_length": 80,
                "generation": {"max_new_tokens": 48},
                "megatron_cfg": {"optimizer": {"lr": 1e-4}, **layout},
            },
            "experience": {
                "start_pass_rate": None,
                "difficulty": "window",
                "difficulty_window": 6,
                "difficulty_range": [0.1, 0.95],
                "difficulty_range_unit": "quantile",
                "difficulty_per_category": True,
                "entropy_percentile": 80,
            },
            "env": {"math": {"num_workers": 1}},
            "eval": {"num_tests_per_prompt": 2},
            "logger": {"log_dir": str(folder / "run")},
        }
    )


def main() -> None:
    folder, model, layout = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    config = config_of(folder, model, layout)
    comm = initialize(config.policy, config.cluster, config.grpo.seed)
    inputs = run_inputs.load_inputs(config, comm)
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    parts = build.build_parts(config, inputs, actor, comm)
    counted = Counted(parts.engine)
    parts = replace(parts, engine=counted)
    solved = prefilled(parts, folder / "solutions")
    parts = replace(parts, experience=build.build_experience(config, inputs.train.questions, comm, None))
    note = load_prefill(parts, folder / "solutions")
    trainer = Trainer(parts)
    trainer.push_weights()
    results = [trainer.step() for _ in range(STEPS)]
    parts.experience.save(folder / "experience")
    evaluator = build.build_evaluator(config, inputs, parts.engine, parts.verifier, comm)
    assert evaluator is not None
    record = {
        "prefill": (solved, note.replace(str(folder), "")),
        "metrics": [result.metrics for result in results],
        "events": [result.events for result in results],
        "groups": list(groups_of(results)),
        "evaluation": evaluator.run().answers,
        "order": list(parts.experience.questions()),
        "retired": sorted(parts.experience.retired),
        "own": {
            name: [(a.token_ids.tolist(), a.logprobs, a.policy_version, a.step) for a in answers]
            for name, answers in parts.experience.own_answers()
        },
        "weights": {name: tensor.numpy() for name, tensor in actor.export_weights()},
        "asked": counted.asked,
    }
    parts.verifier.close()
    process = comm.rank * comm.members + comm.member
    (folder / f"record{process}.pickle").write_bytes(pickle.dumps(record))
    comm.barrier()
    comm.shutdown()


class Counted:
    """The engine, and how many answers each call of it was asked for."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def sample(self, requests: list[SampleRequest], params: SamplingParams) -> list[list[SampledResponse]]:
        self.asked.append(sum(len(request.seeds) for request in requests))
        return self.engine.sample(requests, params)


def prefilled(parts: Parts, folder: Path) -> str:
    report = record_solutions(parts, ["\\boxed{{answer}}"])
    parts.experience.save(folder)
    return report.describe()


def groups_of(results: list[StepResult]) -> Iterator[Any]:
    for result in results:
        yield [
            (group.question.id, [(m.token_ids.tolist(), m.reward, m.replayed) for m in group.trajectories])
            for group in result.groups
        ]


if __name__ == "__main__":
    main()
