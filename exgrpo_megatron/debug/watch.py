"""Watches the steps of a run and keeps the batch of a bad one: every process its own part, in a folder of the run."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from exgrpo_conversion.architecture import Architecture
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.hf_folder import read_config, write_hf_folder
from exgrpo_megatron.comm import together
from exgrpo_megatron.config import Config
from exgrpo_megatron.debug.files import Kept, Origin, write_part
from exgrpo_megatron.debug.verdict import RatioExtremes, faults, ratio_extremes
from exgrpo_megatron.files import replace_text
from exgrpo_megatron.parts import Parts, UpdateGiven
from exgrpo_megatron.recipe import dump_recipe
from exgrpo_megatron.types import Group, Trajectory, UpdateResult

logger = logging.getLogger(__name__)

FOLDER = "debug"
"""Of a run: a folder for each step that was kept."""
WEIGHTS = "weights"


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
        self.num_bad = 0
        self._seen = _Seen(0, {})

    @contextmanager
    def step(self, parts: Parts, step: int) -> Iterator[None]:
        """Around a step: what raises in it is kept too, by every process that it raises on, without the others."""
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
        """What is to be said of the step that is done: nothing, or why it is bad and where it is. Collective."""
        reasons = self._reasons(parts)
        if not reasons:
            return []
        why = "; ".join(reasons)
        self.num_bad += 1
        if self.num_bad > self.config.debug.max_dumps:
            return [f"bad, the {self.num_bad}th since the start, and not kept (debug.max_dumps): {why}"]
        with together(parts.comm):
            self._write(parts, Kept(reasons=reasons, metrics=dict(metrics)))
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
            if self.num_bad <= self.config.debug.max_dumps:
                lines = traceback.format_exception(error)
                self._write(parts, Kept(reasons=[f"{type(error).__name__}: {error}"], traceback="".join(lines)))
                logger.warning("step %d raised; its batch is in %s", self._seen.step, self._path)
        return False

    def _write(self, parts: Parts, kept: Kept) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        if parts.comm.is_main:
            replace_text(self._path / "recipe.yaml", dump_recipe(self.config))
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
                    question = questions[sequence.stored.question_id]
                    text = parts.tokenizer.decode(sequence.response_ids)
                    found[id(sequence.response_ids)] = Origin(question.id, question.text, question.answer, text)
        return found

    def _write_weights(self, parts: Parts) -> str | None:
        """The weights, if they are wanted; on the main process why they are not kept: one of them is no number."""
        if not self.config.debug.weights:
            return None
        arch = Architecture.from_hf_config(read_config(parts.model_dir))
        weights, source, tokenizer = parts.policy.export_weights(), parts.model_dir, parts.tokenizer.folder
        with together(parts.comm):
            try:
                if parts.comm.is_main:
                    target = self._path / WEIGHTS
                    write_hf_folder(target, weights, arch=arch, source_dir=source, tokenizer_dir=tokenizer)
            except ModelFolderError as error:
                return str(error)
            finally:
                for _ in weights:
                    pass  # processes that share the model hand each weight round: none may stop before the end
        return None


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
