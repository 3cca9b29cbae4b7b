"""One step of the trainer for each of the keys whose effect may depend on the number of ranks; rank 0 writes metrics.

Arguments: an output folder and a model folder. The first cases answer from a script, the last ones from the embedded
engine with fewer questions than ranks.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from scripted import all_wrong, build_trainer, half_right, make_config, plant, right

from exgrpo_megatron import build
from exgrpo_megatron.config import MathEnvConfig
from exgrpo_megatron.policy.distributed import initialize
from exgrpo_megatron.rewards.verifier import MathVerifier

NORMALIZERS = ("global_width", "per_answer_length", "rank_width")
BONUSES = (("global_mean", 4), ("per_micro_batch", 4), ("per_micro_batch", 16))


def main() -> None:
    folder, model = Path(sys.argv[1]), sys.argv[2]
    config = make_config(folder)
    comm = initialize(config.policy, config.cluster, config.grpo.seed)
    own = folder / f"rank{comm.rank}"
    own.mkdir(exist_ok=True)
    record = {}
    with MathVerifier(MathEnvConfig(num_workers=1)) as verifier:
        build.build_verifier = lambda *_: verifier
        for name in NORMALIZERS:
            loss = {"normalizer": name, "entropy_coeff": 0.0}
            trainer = build_trainer(own, half_right, comm=comm, loss_fn=loss, policy={"model_name": model})
            record[name] = trainer.step().metrics
        for bonus, size in BONUSES:
            trainer = build_trainer(
                own,
                all_wrong,
                comm=comm,
                num_questions=8,
                loss_fn={"entropy_bonus": bonus, "entropy_coeff": 0.01},
                policy={"model_name": model, "train_micro_batch_size": size},
            )
            record[f"{bonus} {size}"] = trainer.step().metrics
        record["few"] = few_questions(own, model, comm)
        record["replay step"] = replay_steps(own, model, comm)
    if comm.rank == 0:
        (folder / "record.json").write_text(json.dumps(record))
    comm.barrier()
    comm.shutdown()


def few_questions(folder, model, comm):
    """One question a step, replayed in the first: the ranks after the first have nothing to sample, grade or score."""
    trainer = build_trainer(
        folder,
        None,
        comm=comm,
        grpo={"num_prompts_per_step": 1, "num_generations_per_prompt": 2},
        policy={"model_name": model, "train_global_batch_size": 2, "generation": {"max_new_tokens": 24}},
        experience={"replay_ratio": 1.0},
    )
    plant(trainer, "q1", [right("q1")])
    results = [trainer.step() for _ in range(2)]
    everyone = comm.all_gather([[member.token_ids.tolist() for member in r.groups[0].trajectories] for r in results])
    assert all(own == everyone[0] for own in everyone)
    return [result.metrics for result in results]


def replay_steps(folder, model, comm):
    """Two steps with a replay step of an odd number of answers each."""
    trainer = build_trainer(
        folder,
        half_right,
        comm=comm,
        policy={"model_name": model},
        experience={"strategy": "both", "replay_step": {"size": 0.32}},
    )
    plant(trainer, "q1", [right("q1"), right("q1", 1)])
    return [trainer.step().metrics for _ in range(2)]


if __name__ == "__main__":
    main()
