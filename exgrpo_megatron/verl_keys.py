"""What to do instead of keys of verl, and of forks of it such as the released ExGRPO code, in a recipe."""

from __future__ import annotations

_SECTIONS = frozenset(
    {
        "actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_manager", "reward_model",
        "trainer",
    }
)  # fmt: skip
_DATA_KEYS = {
    "data.apply_chat_template_kwargs": "leave it out; the chat template gets the messages alone",
    "data.custom_cls": "leave it out; questions come from files",
    "data.filter_overlong_prompts": "leave it out; too long prompts are always left out",
    "data.max_prompt_length": "use data.max_input_seq_length",
    "data.max_response_length": "use policy.generation.max_new_tokens",
    "data.prompt_key": "use data.train.question_key",
    "data.return_raw_chat": "leave it out; prompts are rendered here",
    "data.reward_impl_version": "use env.math or env.reward_function",
    "data.seed": "use grpo.seed",
    "data.shuffle": "use data.epoch_order; questions are always shuffled",
    "data.train_batch_size": "use grpo.num_prompts_per_step",
    "data.train_files": "use data.train.path",
    "data.train_max_samples": "use data.train.max_questions",
    "data.truncation": "leave it out; prompts are never cut",
    "data.val_batch_size": "use policy.generation.max_batch_size",
    "data.val_files": "use data.validation.path",
    "data.val_max_samples": "use data.validation.max_questions",
}


def verl_advice(dotted: str) -> str | None:
    """What to say of a key that is verl's; None where it is not known to be."""
    name = ".".join(dotted.split(".")[:2])
    if name in _DATA_KEYS:
        return f"verl's; {_DATA_KEYS[name]} (docs/migrating.md)"
    if dotted.split(".")[0] in _SECTIONS:
        return "a section of verl's; docs/migrating.md says what stands for its keys"
    return None
