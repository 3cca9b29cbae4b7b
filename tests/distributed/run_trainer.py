"""Several steps of the trainer with the embedded engine on the launched ranks; the main process writes what they did.

Arguments: a folder for the run, the folder of a model that solves some of the questions, and keys of
policy.megatron_cfg as JSON.
"""

import json
import pickle
import sys
from pathlib import Path

from exgrpo_megatron import build
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.recipe import parse_recipe
from exgrpo_megatron.trainer import Trainer

STEPS = 4


def main() -> None:
    folder, model, layout = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    config = parse_recipe(
        {
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "seed": 5},
            "data": {"train": {"generator": "chain_arithmetic", "generator_size": 64}, "max_input_seq_length": 32},
            "policy": {
                "model_name": str(model),
                "train_global_batch_size": 16,
                "train_micro_batch_size": 8,
                "max_total_sequence_length": 80,
                "generation": {"max_new_tokens": 48},
                "megatron_cfg": {"optimizer": {"lr": 1e-4}, **layout},
            },
            "experience": {"start_pass_rate": None},
            "logger": {"log_dir": str(folder / "run")},
        }
    )
    comm = initialize(config.policy, config.cluster, config.grpo.seed)
    inputs = build.load_inputs(config, comm)
    actor = build.build_rl_actor(config, inputs.model_dir, comm)
    parts = build.build_parts(config, inputs, actor, comm)
    trainer = Trainer(parts)
    trainer.push_weights()
    results = [trainer.step() for _ in range(STEPS)]
    parts.verifier.close()
    weights = {name: tensor.numpy() for name, tensor in actor.export_weights()}
    if comm.is_main:
        stored = {name: parts.experience.answers(name) for name in trainer.questions}
        record = {
            "metrics": [result.metrics for result in results],
            "groups": [
                [
                    (group.question.id, [(m.token_ids.tolist(), m.reward, m.replayed) for m in group.trajectories])
                    for group in result.groups
                ]
                for result in results
            ],
            "stored": {
                name: [(a.token_ids.tolist(), a.logprobs, a.policy_version, a.step) for a in answers]
                for name, answers in stored.items()
            },
            "retired": sorted(parts.experience.retired),
            "weights": weights,
        }
        (folder / "record.pickle").write_bytes(pickle.dumps(record))
    comm.barrier()
    comm.shutdown()


if __name__ == "__main__":
    main()
