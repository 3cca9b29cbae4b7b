"""Two checkpoints of any two formats, compared tensor by tensor; one tensor of each is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from exgrpo_conversion._differences import Difference, are_same, difference, resembles
from exgrpo_conversion.compare_files import FileFinding, compare_configs, compare_tokenizers
from exgrpo_conversion.mapping import EMBEDDING, OUTPUT_LAYER, hf_names
from exgrpo_conversion.source import Source, TensorInfo

Verdict = Literal["equal", "rounded", "tied", "different", "shape", "missing", "extra"]

SAME: frozenset[Verdict] = frozenset({"equal", "rounded", "tied"})
"""Verdicts of tensors that are the same in both."""


@dataclass(frozen=True)
class TensorFinding:
    """What became of one tensor.

    `verdict`: "equal" bit for bit; "rounded": equal once the finer is rounded to the dtype of the coarser; "tied": an
    output layer that one side has and the other takes from the embedding, with equal values; "missing" or "extra" in
    the second checkpoint; "shape" of another shape.
    """

    name: str
    verdict: Verdict
    first: TensorInfo | None
    second: TensorInfo | None
    difference: Difference | None = None
    hint: str = ""
    """What the tensor of the second checkpoint holds instead, where that can be told."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` has found: every tensor, file and key of config.json that was looked at."""

    tensors: tuple[TensorFinding, ...]
    config: tuple[FileFinding, ...]
    tokenizer: tuple[FileFinding, ...]

    @property
    def faults(self) -> list[TensorFinding | FileFinding]:
        """What makes the second checkpoint another model than the first."""
        tensors: list[TensorFinding | FileFinding] = [it for it in self.tensors if it.verdict not in SAME]
        return tensors + [it for it in (*self.config, *self.tokenizer) if it.is_fault]

    @property
    def same(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """Everything, as values that JSON has; a tensor's value that is no number is "nan", "inf" or "-inf"."""
        return {
            "same": self.same,
            "tensors": [_tensor_json(finding) for finding in self.tensors],
            "config": [asdict(finding) for finding in self.config],
            "tokenizer": [asdict(finding) for finding in self.tokenizer],
        }


def compare(first: Source, second: Source, progress: Callable[[int], object] = lambda _: None) -> Comparison:
    """Compare weights, the values of config.json that decide the function computed, and tokenizer files.

    `progress` is called with the bytes of each tensor of the second checkpoint that is done.

    Raises:
        ModelFolderError: a file is damaged.
    """
    found: dict[str, TensorFinding] = {}
    for finding in _tensors(first, second, progress):
        if finding.verdict == "different" and sum(bool(it.difference) for it in found.values()) < _MAX_HINTS:
            finding = replace(finding, hint=_hint(first, finding.name, second.read(finding.name)))
        found[finding.name] = finding
    copied = any(finding.verdict == "tied" for finding in found.values())
    order = [*first.infos(), *(name for name in second.infos() if name not in first.infos())]
    return Comparison(
        tensors=tuple(found[name] for name in order),
        config=tuple(compare_configs(first, second, tie_is_fault=not copied)),
        tokenizer=tuple(compare_tokenizers(first.config_folder, second.config_folder)),
    )


_MAX_HINTS = 8
"""Tensors for which the first checkpoint is searched: where all differ, that would read it once for each."""


def _tensors(first: Source, second: Source, progress: Callable[[int], object]) -> Iterator[TensorFinding]:
    mine, its = first.infos(), second.infos()
    for name, tensor in second.tensors():
        if name in mine:
            yield _one(first, second, name, tensor)
        else:
            yield _unmatched(name, None, its[name], first, tensor)
        progress(tensor.nbytes)
    for name in mine:
        if name not in its:
            yield _unmatched(name, mine[name], None, second, first.read(name))


def _one(first: Source, second: Source, name: str, tensor: Tensor) -> TensorFinding:
    before, after = first.infos()[name], second.infos()[name]
    if before.shape != after.shape:
        return TensorFinding(name, "shape", before, after)
    expected = first.read(name)
    found = difference(expected, tensor)
    if found is None:
        return TensorFinding(name, "equal" if before.dtype == after.dtype else "rounded", before, after)
    return TensorFinding(name, "different", before, after, found)


def _unmatched(
    name: str, before: TensorInfo | None, after: TensorInfo | None, other: Source, tensor: Tensor
) -> TensorFinding:
    """A tensor that only one side has: a fault, unless it is a copy of the embedding, to which the other is tied."""
    verdict: Verdict = "missing" if after is None else "extra"
    (embedding,), (head,) = hf_names(other.arch, EMBEDDING), hf_names(replace(other.arch, tied=False), OUTPUT_LAYER)
    if name != head or not other.arch.tied or other.infos()[embedding].shape != tuple(tensor.shape):
        return TensorFinding(name, verdict, before, after)
    tied = other.read(embedding)
    found = difference(tensor, tied) if after is None else difference(tied, tensor)
    if found is None:
        return TensorFinding(name, "tied", before, after)
    return TensorFinding(name, verdict, before, after, found, f"the other side takes it from {embedding}")


def _hint(first: Source, name: str, tensor: Tensor) -> str:
    """What the second checkpoint's tensor is, if it is another one of the first, or this one in another order."""
    text = resembles(first.read(name), tensor)
    if text:
        return f"{text} of the first"
    layer, kind = ".".join(name.split(".")[:3]), name.split(".")[3:]
    same_shape = [other for other, info in first.infos().items() if info.shape == tuple(tensor.shape) and other != name]
    in_layer = [other for other in same_shape if other.startswith(f"{layer}.")]
    of_kind = [other for other in same_shape if kind and other.split(".")[3:] == kind]
    for other in [*in_layer, *of_kind]:
        if are_same(first.read(other), tensor):
            return f"it is {other} of the first"
    return ""


def _tensor_json(finding: TensorFinding) -> dict[str, Any]:
    sides = {"first": finding.first, "second": finding.second}
    stored = {
        side: None if info is None else {"shape": list(info.shape), "dtype": str(info.dtype).removeprefix("torch.")}
        for side, info in sides.items()
    }
    return {
        "name": finding.name,
        "verdict": finding.verdict,
        **stored,
        "difference": None if finding.difference is None else _difference_json(finding.difference),
        "hint": finding.hint,
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    values = {side: getattr(difference, side) for side in ("first", "second")}
    return asdict(difference) | {side: value if math.isfinite(value) else str(value) for side, value in values.items()}
