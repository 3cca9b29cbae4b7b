"""Log-prob, entropy and shaped loss: the reference definition and its implementations.

    from exgrpo_kernels import LossInputs, Objective, OutputHead, token_loss

    loss = token_loss(hidden, OutputHead(weight, valid_vocab=151643), LossInputs(...), Objective()).loss

kernels/README.md says what each form costs. Names are imported when they are asked for: the package by itself needs no
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exgrpo_kernels.fused import Form, logits_loss, logprobs, score, token_loss
    from exgrpo_kernels.reference import Objective, Shaping, TokenTerms, logprob_entropy, token_terms
    from exgrpo_kernels.types import Columns, FusedLoss, LossInputs, OutputHead

__all__ = [
    "Columns",
    "Form",
    "FusedLoss",
    "LossInputs",
    "Objective",
    "OutputHead",
    "Shaping",
    "TokenTerms",
    "logits_loss",
    "logprob_entropy",
    "logprobs",
    "score",
    "token_loss",
    "token_terms",
]

_OF_THE_DEFINITION = frozenset({"Objective", "Shaping", "TokenTerms", "logprob_entropy", "token_terms"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"{__name__}.{'reference' if name in _OF_THE_DEFINITION else 'fused'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
