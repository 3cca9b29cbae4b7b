"""Mistral without a sliding window (7B v0.2 and later, Mathstral)."""

from exgrpo_conversion.families.family import DENSE_LAYER, Family

MISTRAL = Family(
    model_type="mistral",
    layer=DENSE_LAYER,
    absent={"num_key_value_heads": 8, "sliding_window": 4096},
    only={"sliding_window": None},
)
