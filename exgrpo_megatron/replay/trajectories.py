"""Trajectories as dictionaries, checked at the door, and as what a buffer hands out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exgrpo_megatron.experience.soundness import answer_fault
from exgrpo_megatron.types import Group, Logprobs, Question, TokenIds, Trajectory

REQUIRED = ("question_id", "token_ids", "logprobs", "reward")
OPTIONAL = ("prompt_ids", "policy_version", "replayed")

NO_PROMPT: TokenIds = np.zeros(0, np.int32)


@dataclass(frozen=True)
class ReplayedTrajectory:
    """One stored answer, drawn for replay. It was correct when it was stored."""

    question_id: str
    prompt_ids: TokenIds | None
    """As last given for the question; None where that never was."""
    token_ids: TokenIds
    """Of the response."""
    logprobs: Logprobs
    """As recorded: one a response token, under the policy that wrote it, rounded once to multiples of 2^-20."""
    policy_version: int
    step: int
    """The call of `add` that stored it, from 1."""
    correctness_rate: float
    """Of its question, by the buffer's metric, when it was drawn."""
    entropy: float
    """Mean of -log-prob as recorded: an estimate of the mean token entropy (nats) of the policy that wrote it."""

    def as_dict(self) -> dict[str, Any]:
        """In the form that `TrajectoryBuffer.add` takes, but for the reward; marked as replayed, so that added again it
        is no new attempt."""
        prompt = {} if self.prompt_ids is None else {"prompt_ids": self.prompt_ids}
        return {
            "question_id": self.question_id,
            **prompt,
            "token_ids": self.token_ids,
            "logprobs": self.logprobs,
            "policy_version": self.policy_version,
            "replayed": True,
        }


def as_groups(trajectories: Mapping[str, Any] | Group | Iterable[Mapping[str, Any] | Group]) -> list[Group]:
    """The trajectories by question, in the order in which the questions come first.

    Raises:
        ValueError: one is not what it must be; its place, question and key are named.
    """
    given = [trajectories] if isinstance(trajectories, Mapping | Group) else list(trajectories)
    prompts: dict[str, TokenIds] = {}
    members: dict[str, list[Trajectory]] = {}
    for place, one in enumerate(given):
        question_id, prompt, found = _of_group(place, one) if isinstance(one, Group) else _of_mapping(place, one)
        if prompt is not None and not np.array_equal(prompts.setdefault(question_id, prompt), prompt):
            raise ValueError(f"{_where(place, question_id)}: prompt_ids differ from those of the same question before")
        members.setdefault(question_id, []).extend(found)
    return [
        Group(Question(question_id, prompts.get(question_id, NO_PROMPT), answer=""), tuple(found))
        for question_id, found in members.items()
    ]


def _of_group(place: int, group: Group) -> tuple[str, TokenIds | None, list[Trajectory]]:
    for member in group.trajectories:
        _check(place, group.question.id, member.token_ids, member.logprobs, member.reward)
    prompt = group.question.prompt_ids
    return group.question.id, prompt if len(prompt) else None, list(group.trajectories)


def _of_mapping(place: int, given: Any) -> tuple[str, TokenIds | None, list[Trajectory]]:
    if not isinstance(given, Mapping):
        raise ValueError(f"trajectory {place} is a {type(given).__name__}: it must be a mapping or a types.Group")
    question_id = given.get("question_id")
    missing = [name for name in REQUIRED if name not in given]
    unknown = [name for name in given if name not in (*REQUIRED, *OPTIONAL)]
    if missing or unknown:
        fault = f"{missing[0]} is missing" if missing else f"unknown key {unknown[0]!r}"
        raise ValueError(f"{_where(place, question_id)}: {fault}; its keys are {_KEYS}")
    if not isinstance(question_id, str) or not question_id:
        raise ValueError(f"trajectory {place}: question_id = {question_id!r} must be a text that is not empty")
    if len(question_id.encode(errors="surrogatepass")) >= 2**16 or _is_broken(question_id):
        raise ValueError(
            f"trajectory {place}: question_id {question_id[:40]!r} must be Unicode of less than 2^16 bytes"
        )
    prompt = given.get("prompt_ids")
    prompt_ids = None if prompt is None else _token_ids(place, question_id, "prompt_ids", prompt)
    token_ids = _token_ids(place, question_id, "token_ids", given["token_ids"])
    logprobs = _array(place, question_id, "logprobs", given["logprobs"], np.float64).astype(np.float32)
    _check(place, question_id, token_ids, logprobs, given["reward"])
    version = given.get("policy_version", 0)
    if isinstance(version, bool) or not isinstance(version, int | np.integer) or not abs(int(version)) < 2**63:
        raise ValueError(
            f"{_where(place, question_id)}: policy_version = {version!r} must be a whole number below 2^63"
        )
    replayed = bool(given.get("replayed", False))
    return (
        question_id,
        prompt_ids,
        [Trajectory(token_ids, logprobs, float(given["reward"]), replayed, "stop", int(version))],
    )


_KEYS = f"{', '.join(REQUIRED)}; also {', '.join(OPTIONAL)}"


def _is_broken(text: str) -> bool:
    """Whether it has half of a surrogate pair, which is no character."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _check(place: int, question_id: str, token_ids: TokenIds, logprobs: Logprobs, reward: Any) -> None:
    fault = answer_fault(token_ids, logprobs)
    if fault is not None:
        raise ValueError(f"{_where(place, question_id)}: {fault}; every token needs a finite recorded log-prob")
    if not isinstance(reward, Real) or not math.isfinite(float(reward)):
        raise ValueError(f"{_where(place, question_id)}: reward = {reward!r} must be a finite number")


def _token_ids(place: int, question_id: str, name: str, given: Any) -> TokenIds:
    values = _array(place, question_id, name, given)
    if values.size and (values != np.floor(values)).any():
        raise ValueError(f"{_where(place, question_id)}: {name} must be whole numbers")
    if values.size and not (values.min() >= 0 and values.max() < 2**31):
        raise ValueError(f"{_where(place, question_id)}: {name} must be from 0 to 2^31 - 1")
    return values.astype(np.int32)


def _array(place: int, question_id: str, name: str, given: Any, dtype: type | None = None) -> NDArray[Any]:
    """One row of numbers, from a list, an array or a tensor on any device; None in a list of float64 is NaN."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu().to(torch.float64 if given.is_floating_point() else given.dtype).numpy()
    try:
        values = np.asarray(given, dtype)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{_where(place, question_id)}: {name} is no row of numbers ({error})") from None
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iuf"):
        raise ValueError(
            f"{_where(place, question_id)}: {name} must be one row of numbers, found shape {list(values.shape)} of "
            f"{values.dtype}"
        )
    return values


def _where(place: int, question_id: Any) -> str:
    return f"trajectory {place} (question {question_id!r})"
