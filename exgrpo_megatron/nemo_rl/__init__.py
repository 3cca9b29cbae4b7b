"""NeMo-RL's GRPO configurations as recipes: what is ours is taken, the rest is listed with its reason, or refused."""

from __future__ import annotations

from exgrpo_megatron.nemo_rl.translation import Translation, is_nemo_rl, translate

__all__ = ["Translation", "is_nemo_rl", "translate"]
