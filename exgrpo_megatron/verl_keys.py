"""What to do instead of keys of verl, and of forks of it such as the released ExGRPO code, in a recipe."""

from __future__ import annotations

_SECTIONS = (
    "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_manager", "reward_model", "trainer",
)  # fmt: skip
_DATA_KEYS = {
    "data.max_prompt_length": "data.max_input_seq_length",
    "data.max_response_length": "policy.generation.max_new_tokens",
    "data.train_batch_size": "grpo.num_prompts_per_step",
    "data.train_files": "data.train.path",
    "data.val_files": "data.validation.path",
}


def verl_advice(dotted: str) -> str | None:
    """What to say of a key that is verl's; None where it is not known to be."""
    if dotted in _DATA_KEYS:
        return f"verl's; use {_DATA_KEYS[dotted]} (docs/migrating.md)"
    if dotted.split(".")[0] in _SECTIONS:
        return "a section of verl's; docs/migrating.md says what stands for its keys"
    return None
