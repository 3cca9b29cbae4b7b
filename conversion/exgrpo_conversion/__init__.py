"""Hugging Face and Megatron weight layouts, and the mapping between them."""
