"""`common.pt`: what is the same on every rank, read as plain values. Objects of other programs are not made."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from exgrpo_conversion.errors import ModelFolderError


class Unread:
    """Stands for an object of any class but the plainest; nothing is done with what the file says of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def __setstate__(self, state: Any) -> None:
        del state


def read_common(path: Path) -> dict[str, Any]:
    """The dictionary in a common.pt; no code of the file runs.

    Raises:
        ModelFolderError: it is missing or damaged.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins: list[Any] = [(Namespace if name == "argparse.Namespace" else _stand_in(), name) for name in named]
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: the checkpoint is incomplete") from None
    except pickle.UnpicklingError as error:
        raise ModelFolderError(f"{path} is refused: reading it could run code of its author") from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{path} is damaged: {str(error).splitlines()[:1]}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} holds a {type(content).__name__}, not a dictionary")
    return content


def _stand_in() -> type[Unread]:
    """A class of its own for each name: torch finds what is allowed by class."""
    return type("Unread", (Unread,), {})
