"""The supported model families, one file each."""

from __future__ import annotations

from exgrpo_conversion.families.family import Family
from exgrpo_conversion.families.llama import LLAMA
from exgrpo_conversion.families.mistral import MISTRAL
from exgrpo_conversion.families.qwen2 import QWEN2
from exgrpo_conversion.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (QWEN2, QWEN3, LLAMA, MISTRAL)}
"""By `model_type`."""
