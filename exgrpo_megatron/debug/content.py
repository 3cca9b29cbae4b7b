"""What a `rank_N.json` and a line of `rank_N.jsonl` hold, checked when they are read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from exgrpo_kernels.reference import Objective

MAX_RANKS = 1_000_000
_Count = Annotated[int, Field(ge=0)]
_AtLeastOne = Annotated[int, Field(ge=1)]


class SequenceContent(BaseModel):
    """One sequence of this rank's share."""

    index: _Count
    """Among those of all ranks."""
    prompt_tokens: _Count
    response_tokens: _AtLeastOne
    advantage: float
    replayed: bool
    policy_weight: float
    entropy_weight: float
    stored: tuple[str, int] | None


class UpdateContent(BaseModel):
    """One optimiser step; the first four are None where it raised."""

    loss: float | None
    grad_norm: float | None
    skipped: bool | None
    learning_rate: float | None
    objective: Objective
    temperature: float
    micro_batch_entropy_coeff: float
    version: int
    sequences: list[SequenceContent]


class RankContent(BaseModel):
    """The JSON file of one process; what nobody reads again is left out."""

    start: str = ""
    """When the run began or went on: the same for all ranks, and later for a later start."""
    step: int
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    data_parallel_rank: _Count
    data_parallel_size: _AtLeastOne
    reasons: list[str]
    traceback: str | None
    weights_version: int | None
    updates: list[UpdateContent]


class TextPlace(BaseModel):
    """Which sequence a line of texts is of."""

    update: _Count
    index: _Count
