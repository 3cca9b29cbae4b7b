"""Steps with a learning rate at which the policy breaks, on the launched ranks, with `debug.enabled`.

Arguments: a folder for the run, and keys of policy.megatron_cfg as JSON. Rank 0 writes the metrics and warnings of its
steps.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "trainer"))

from scripted import build_trainer, half_right, make_config

from exgrpo_megatron.policy.distributed import initialize

STEPS = 1


def main() -> None:
    folder, layout = Path(sys.argv[1]), json.loads(sys.argv[2])
    sections = {
        # The script's log-probs are -0.5 a token. After one optimiser step at that rate the policy is sure of every
        # token, some of which are there: their ratio is e^0.5 = 1.65.
        "debug": {"enabled": True, "max_ratio": 1.5},
        "loss_fn": {"old_logprobs": "engine"},
        "policy": {"train_global_batch_size": 8, "megatron_cfg": {"optimizer": {"lr": 10.0}, **layout}},
        "env": {"math": {"exact_text": True}},
    }
    config = make_config(folder, **sections)
    comm = initialize(config.policy, config.cluster, config.grpo.seed)
    trainer = build_trainer(folder, half_right, comm=comm, **sections)
    steps = []
    trainer.fit(STEPS, lambda result: steps.append((result.metrics, result.warnings)) is None)
    if comm.is_main:
        (folder / "steps.json").write_text(json.dumps(steps))
    comm.barrier()
    comm.shutdown()


if __name__ == "__main__":
    main()
