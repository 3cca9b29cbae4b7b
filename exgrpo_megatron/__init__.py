"""ExGRPO on Megatron-Core: group-relative policy optimisation with verifiable rewards and experience replay.

    from exgrpo_megatron import load_recipe, train

    if __name__ == "__main__":
        result = train(load_recipe("recipes/quickstart.yaml", {"grpo.seed": 7}))
        print(result.metrics["validation/pass_rate_t1"], result.export)

What stands in `__all__` here, in `exgrpo_megatron.replay`, `exgrpo_kernels` and `exgrpo_conversion` is the public
interface (docs/python.md). Names are imported when they are asked for: the package by itself takes no time.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from exgrpo_megatron.api import TrainingResult, train
    from exgrpo_megatron.config import Config
    from exgrpo_megatron.errors import CheckpointError, ConfigError, DataError, LostRankError, UserError
    from exgrpo_megatron.recipe import load_recipe

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "LostRankError",
    "TrainingResult",
    "UserError",
    "__version__",
    "load_recipe",
    "train",
]

_MODULES = {"TrainingResult": "api", "train": "api", "Config": "config", "load_recipe": "recipe"}
"""Where a public name stands; the others are errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
