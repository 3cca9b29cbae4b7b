"""The Megatron-Core actor; the only package that imports megatron."""

import importlib
import warnings

from exgrpo_megatron.accelerators import hide_unusable, uncompiled_without_gpu

# On import Megatron-Core says in six warnings that optional libraries are absent (`exgrpo doctor` says it once), and on
# every save and load that it calls torch by names which torch is about to change.
for _category in (UserWarning, FutureWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"(megatron|torch\.distributed\.checkpoint)\.")

# Here and nowhere later: every module of this package imports Megatron-Core, which takes up what it finds and decorates
# its functions as it is imported.
hide_unusable()
with uncompiled_without_gpu():
    importlib.import_module("megatron.core.models.gpt.gpt_model")
