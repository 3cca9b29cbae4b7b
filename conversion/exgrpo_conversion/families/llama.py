"""Llama 2, 3, 3.1 to 3.3, and what is built alike (SmolLM2)."""

from exgrpo_conversion.families.family import DENSE_LAYER, Family

LLAMA = Family(
    model_type="llama",
    layer=DENSE_LAYER,
    only={"rope_interleaved": False},
    harmless={"is_llama_config": "a mark of the tool that wrote the file"},
)
