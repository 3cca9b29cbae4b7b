"""The Megatron-Core actor; the only package that imports megatron."""

import warnings

# On import Megatron-Core says in six warnings that optional libraries are absent; `exgrpo doctor` says it once.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")
