"""Hugging Face and Megatron weight layouts, and the mapping between them.

    from exgrpo_conversion import Target, convert_checkpoint, open_source

    convert_checkpoint(open_source("runs/quickstart/hf"), Target("torch_dist", Path("megatron")))

docs/conversion.md says what is read and written. Names are imported when they are asked for: the package by itself
needs no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exgrpo_conversion.architecture import Architecture, UnsupportedModelError
    from exgrpo_conversion.compare import Comparison, TensorFinding
    from exgrpo_conversion.compare import compare as compare_checkpoints
    from exgrpo_conversion.convert import Summary, Target
    from exgrpo_conversion.convert import convert as convert_checkpoint
    from exgrpo_conversion.errors import ModelFolderError
    from exgrpo_conversion.families.family import Family
    from exgrpo_conversion.formats import open_source
    from exgrpo_conversion.source import Source, TensorInfo

__all__ = [
    "Architecture",
    "Comparison",
    "Family",
    "ModelFolderError",
    "Source",
    "Summary",
    "Target",
    "TensorFinding",
    "TensorInfo",
    "UnsupportedModelError",
    "compare_checkpoints",
    "convert_checkpoint",
    "open_source",
]

_PLACES = {
    "Architecture": "architecture:Architecture",
    "Comparison": "compare:Comparison",
    "Family": "families.family:Family",
    "ModelFolderError": "errors:ModelFolderError",
    "Source": "source:Source",
    "Summary": "convert:Summary",
    "Target": "convert:Target",
    "TensorFinding": "compare:TensorFinding",
    "TensorInfo": "source:TensorInfo",
    "UnsupportedModelError": "architecture:UnsupportedModelError",
    "compare_checkpoints": "compare:compare",
    "convert_checkpoint": "convert:convert",
    "open_source": "formats:open_source",
}
"""Modules `convert` and `compare` have a function of their own name, which is called differently here."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    module, _, found = _PLACES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), found)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
