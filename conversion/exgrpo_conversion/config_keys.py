"""The keys of config.json that mean the same in every family: read, of one supported value, or without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ = frozenset(
    {
        "architectures", "head_dim", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
        "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
    }
)  # fmt: skip
"""Mapped: `Architecture.from_hf_config` reads them, whatever the family."""

ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "use_sliding_window": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": None,
    "compression_config": None,
    "auto_map": None,
}
"""Change what is computed, or by whose code; the one value that is mapped (null is accepted too)."""

_HARMLESS: Mapping[str, tuple[str, ...]] = {
    "names a token; no weight depends on it": (
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
        "mask_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
    ),
    "only makes the weights of an untrained model": ("initializer_range",),
    "the dtype is that of the tensors in the files": ("dtype", "torch_dtype", "use_bfloat16"),
    "says how a call runs and what it returns, not what it computes": (
        "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
        "chunk_size_feed_forward", "gradient_checkpointing", "attn_implementation", "_attn_implementation",
        "_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attention_2", "use_flash_attn",
        "experts_implementation", "tf_legacy_loss",
    ),
    "says where the file comes from": (
        "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "transformers.js_config",
        "unsloth_version", "unsloth_fixed",
    ),
    "how the training run that made the model cut its matrices: the product is the same": ("pretraining_tp",),
    "a length that tokenizers and data were cut to; positions go by max_position_embeddings": (
        "max_sequence_length", "model_max_length", "tokenizer_model_max_length",
    ),
    "is of classifiers and encoder-decoders": (
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
        "is_decoder", "tie_encoder_decoder", "cross_attention_hidden_size",
    ),
    "chooses tokens after the logits are there; transformers reads generation_config.json instead": (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
        "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
        "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
        "typical_p",
    ),
}  # fmt: skip

HARMLESS: Mapping[str, str] = {key: reason for reason, keys in _HARMLESS.items() for key in keys}
"""Without effect on the function, whatever the value, with the reason."""
