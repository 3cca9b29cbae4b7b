"""A reward and a source of questions of your own: a random model learns to repeat a digit, half a minute on a CPU.

python examples/own_reward.py
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/own_reward.py
"""

from collections.abc import Iterator

from exgrpo_megatron import load_recipe, train


def digits() -> Iterator[dict[str, str]]:
    for digit in "0123456789":
        yield {"question": f"{digit}+0", "answer": digit}


def repeats(*, response: str, answer: str, **_: str) -> float:
    return response.count(answer) / max(len(response), 4)  # the share of the answer's digit


if __name__ == "__main__":
    # A mapping replaces the whole section: env.math of the quickstart has rules of the verifier, which has no say here.
    own = {"env": {"reward_function": repeats, "correct_above": 0.9}, "data.train": {"source_function": digits}}
    batch = {"grpo.num_prompts_per_step": 8, "grpo.num_generations_per_prompt": 16, "grpo.max_num_steps": 60}
    model = {"policy.generation.max_new_tokens": 8, "policy.train_global_batch_size": 64, "sft.warm_start": False}
    learning = {"policy.megatron_cfg.optimizer.lr": 1e-3, "loss_fn.entropy_coeff": 0.02, "data.validation": None}
    recipe = load_recipe("recipes/quickstart.yaml", {**own, **batch, **model, **learning, "logger.log_dir": "runs/own"})
    result = train(recipe)
    if result.rank == 0:
        print(f"reward of the last step: {result.metrics['reward/mean']:.2f}; the model: {result.export}")
