"""The Megatron-Core actor; the only package that imports megatron."""
