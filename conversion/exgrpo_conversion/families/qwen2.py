"""Qwen2 and Qwen2.5, Math and Coder included."""

from exgrpo_conversion.families.family import DENSE_LAYER, QKV_BIAS, Family

QWEN2 = Family(
    model_type="qwen2",
    layer={**DENSE_LAYER, **QKV_BIAS},
    absent={"num_key_value_heads": 32},
    only={"use_mrope": False},
    harmless={
        "sliding_window": "use_sliding_window is false",
        "max_window_layers": "use_sliding_window is false",
        "attention_bias": "the family has biases of query, key and value; transformers does not read the key",
    },
)
