"""Qwen3, the dense models."""

from exgrpo_conversion.families.family import DENSE_LAYER, QK_NORM, Family

QWEN3 = Family(
    model_type="qwen3",
    layer={**DENSE_LAYER, **QK_NORM},
    absent={"num_key_value_heads": 32, "head_dim": 128},
    harmless={
        "sliding_window": "use_sliding_window is false",
        "max_window_layers": "use_sliding_window is false",
    },
)
