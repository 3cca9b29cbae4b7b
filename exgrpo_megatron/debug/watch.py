"""Watches the steps of a run and keeps the batch of a bad one: every process its own part, in a folder of the run."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_folder import read_config, write_hf_folder
from exgrpo_megatron.comm import together
from exgrpo_megatron.config import Config
from exgrpo_megatron.debug.files import WEIGHTS, Kept, Origin
from exgrpo_megatron.debug.verdict import RatioExtremes, faults, ratio_extremes
from exgrpo_megatron.debug.write import remove_step, remove_weights, write_part
from exgrpo_megatron.errors import UserError
from exgrpo_megatron.parts import Parts, UpdateGiven
from exgrpo_megatron.types import Group, Trajectory, UpdateResult

logger = logging.getLogger(__name__)

FOLDER = "debug"
"""Of a run: a folder for each step that was kept."""


@dataclass
class _Seen:
    """Of the step that runs."""

    step: int
    random: dict[str, NDArray[np.uint8]]
    groups: Sequence[Group] = ()
    given: Sequence[UpdateGiven] = ()
    results: Sequence[UpdateResult] = ()


class BadStepWatch:
    """`parts.StepWatch` that keeps batches. What it holds of a step are the step's own arrays, until the next one."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.logger.log_dir) / FOLDER
        self.num_bad = self.num_kept = self.num_not_written = 0
        self._start = ""
        self._seen = _Seen(0, {})

    @contextmanager
    def step(self, parts: Parts, step: int) -> Iterator[None]:
        """Around a step: what raises in it is kept too, by every process that it raises on, without the others."""
        self._start = self._start or parts.comm.broadcast(datetime.now(UTC).isoformat(timespec="microseconds"))
        self._seen = _Seen(step, _random_states())
        with ExitStack() as stack:
            stack.push(lambda *raised: self._raised(parts, raised[1]))
            yield

    def groups(self, groups: Sequence[Group]) -> None:
        self._seen.groups = list(groups)

    def before(self, given: UpdateGiven) -> None:
        self._seen.given = [*self._seen.given, given]

    def after(self, result: UpdateResult) -> None:
        self._seen.results = [*self._seen.results, result]

    def judge(self, parts: Parts, metrics: Mapping[str, float]) -> list[str]:
        """What is to be said of the step that is done: nothing, or why it is bad and where it is, or why its batch
        could not be kept, which is no reason to end a run. Collective."""
        reasons = self._reasons(parts)
        if not reasons:
            return []
        why = "; ".join(reasons)
        self.num_bad += 1
        if self.num_kept >= self.config.debug.max_dumps:
            return [f"bad, the {self.num_bad}th since the start, and not kept (debug.max_dumps): {why}"]
        if fault := self._write_together(parts, Kept(reasons=reasons, metrics=dict(metrics), start=self._start)):
            self.num_not_written += 1
            return [f"bad: {why}. Its batch could not be kept ({self.num_not_written} since the start): {fault}"]
        self.num_kept += 1
        fault = self._write_weights(parts)
        refused = f" Its weights are not kept: {fault}." if fault else ""
        return [f"bad: {why}. Its batch is in {self._path}: `exgrpo debug {self._path}` shows it.{refused}"]

    @property
    def _path(self) -> Path:
        return self.folder / f"step_{self._seen.step:06d}"

    def _reasons(self, parts: Parts) -> list[str]:
        ranks = parts.comm.all_gather([ratio_extremes(result) for result in self._seen.results])
        reasons = []
        for number, result in enumerate(self._seen.results):
            together_ = RatioExtremes(
                max(rank[number].largest_log for rank in ranks), sum(rank[number].num_not_finite for rank in ranks)
            )
            found = faults(self.config.debug, result, together_)
            reasons += [f"optimiser step {number + 1}: {', '.join(found)}"] if found else []
        return reasons

    def _raised(self, parts: Parts, error: BaseException | None) -> bool:
        """Keeps what there is of a step that raised `error`; answers False, for the error goes on."""
        if isinstance(error, Exception):
            self.num_bad += 1
            logger.warning("step %d raised; %s", self._seen.step, self._kept_raised(parts, error))
        return False

    def _kept_raised(self, parts: Parts, error: Exception) -> str:
        """Where its batch is, or why it is nowhere. Others may raise at the same time, or never: what an earlier start
        left of theirs is told by its `start`."""
        if self.num_kept >= self.config.debug.max_dumps:
            return "its batch is not kept (debug.max_dumps)"
        lines = traceback.format_exception(error)
        kept = Kept(reasons=[f"{type(error).__name__}: {error}"], traceback="".join(lines), start=self._start)
        try:
            remove_weights(self._path)
            self._write(parts, kept)
        except Exception as fault:  # noqa: BLE001  the step's own error is the one that must be seen
            return f"its batch could not be kept: {type(fault).__name__}: {fault}"
        return f"its batch is in {self._path}"

    def _write_together(self, parts: Parts, kept: Kept) -> str | None:
        """Everybody's files, in place of an earlier start's; where one cannot be written, why, and none is left."""
        try:
            with together(parts.comm):
                if parts.comm.is_main:
                    remove_step(self._path)
            with together(parts.comm):
                self._write(parts, kept)
        except (UserError, OSError) as error:
            with suppress(UserError, OSError):
                if parts.comm.is_main:
                    remove_step(self._path)
            return str(error)
        return None

    def _write(self, parts: Parts, kept: Kept) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        write_part(self._path, parts, kept, self._seen.step, self._pairs(), self._origins(parts), self._seen.random)

    def _pairs(self) -> list[tuple[UpdateGiven, UpdateResult | None]]:
        """Every optimiser step that was begun, with what came of it."""
        missing = len(self._seen.given) - len(self._seen.results)
        return list(zip(self._seen.given, [*self._seen.results, *[None] * missing], strict=True))

    def _origins(self, parts: Parts) -> dict[int, Origin]:
        """By the identity of a sequence's response: the arrays of an update are those of the answers themselves."""
        members = [(group, member) for group in self._seen.groups for member in group.trajectories]
        found = {id(member.token_ids): _origin(group, member, parts) for group, member in members}
        questions = {question.id: question for question in parts.train.questions}
        for given in self._seen.given:
            for sequence in given.sequences:
                if id(sequence.response_ids) not in found and sequence.stored is not None:
                    name = sequence.stored.question_id
                    origin = Origin(question_id=name, answer=parts.tokenizer.decode(sequence.response_ids))
                    if question := questions.get(name):
                        origin = replace(origin, question=question.text, gold=question.answer)
                    found[id(sequence.response_ids)] = origin
        return found

    def _write_weights(self, parts: Parts) -> str | None:
        """The weights, if they are wanted; why they are not kept: one of them is no number, or there is no room."""
        if not self.config.debug.weights:
            return None
        weights, source, tokenizer = parts.policy.export_weights(), parts.model_dir, parts.tokenizer.folder
        fault = None
        try:
            if parts.comm.is_main:
                arch = Architecture.from_hf_config(read_config(source))
                write_hf_folder(self._path / WEIGHTS, weights, arch=arch, source_dir=source, tokenizer_dir=tokenizer)
        except (ModelFolderError, OSError, SafetensorError) as error:
            fault = str(error)
        finally:
            for _ in weights:
                pass  # processes that share the model hand each weight round: none may stop before the end
        return parts.comm.broadcast(fault)


def _origin(group: Group, member: Trajectory, parts: Parts) -> Origin:
    return Origin(
        question_id=group.question.id,
        question=group.question.text,
        gold=group.question.answer,
        answer=parts.tokenizer.decode(member.token_ids),
        reward=float(member.reward),
        correct=bool(member.correct),
        stop_reason=member.stop_reason,
        policy_version=member.policy_version,
    )


def _random_states() -> dict[str, NDArray[np.uint8]]:
    """Of torch's generators. Draws of the trainer have none: each is seeded by grpo.seed, the step and its purpose."""
    states = {"random.cpu": torch.get_rng_state().numpy().copy()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random.cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return states
