"""The replay step: an optimiser step on stored correct answers, for which nothing is generated."""

from __future__ import annotations

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.algorithm.replay_step import replay_objective, stored_sequences
from exgrpo_megatron.parts import Parts, update_shared
from exgrpo_megatron.ratio_cap import capped
from exgrpo_megatron.replay_draw import ReplayDraw
from exgrpo_megatron.replay_step_metrics import ReplayStepRecord
from exgrpo_megatron.types import TrainSequence


class ReplayStep:
    """Draws stored answers and trains on them; every method is collective, and answers alike on every process."""

    def __init__(self, parts: Parts, replay: ReplayDraw) -> None:
        self.parts, self.replay = parts, replay
        self.config = parts.config

    def joining(self, step: int, *, on: bool) -> ReplayStepRecord:
        """The stored answers that join the step's update on new ones; none unless `experience.replay_step.joint`.

        `on`: replay steps have begun, and nothing keeps this step from them.
        """
        record = ReplayStepRecord()
        if on and self.config.experience.replay_step.joint:
            self._draw(step, 0, record)
        return record

    def run(self, step: int, *, on: bool, cap: float | None) -> ReplayStepRecord:
        """The optimiser steps on stored answers alone; none where nothing is stored, or where they join others.

        `cap`: ratio above which a token has no gradient, see `ratio_cap.capped`.
        """
        keys, record = self.config.experience.replay_step, ReplayStepRecord()
        if not on or keys.joint:
            return record
        for number in range(keys.num_steps):
            sequences = self._draw(step, number, record)
            if sequences:
                sequences, num_capped = capped(self.parts, sequences, cap)
                record.num_capped += num_capped
                objective = replay_objective(self.config)
                record.updates.append(update_shared(self.parts, sequences, objective, lr_multiplier=keys.lr_multiplier))
        return record

    def _draw(self, step: int, number: int, record: ReplayStepRecord) -> list[TrainSequence]:
        """One answer of each of min(floor(size x B x K), stored) questions; writes down what was drawn."""
        experience, keys = self.parts.experience, self.config.experience.replay_step
        size = min(self.config.max_replay_step_answers, experience.num_questions)
        if not size:
            return []
        rng = generator(self.config.grpo.seed, step, f"replay step {number}, draw")
        drawn = experience.intact(experience.draw(size, rng, weights=(keys.bucket_weight, keys.bucket_sigma)))
        record.num_drawable = experience.num_drawable
        if not drawn:
            return []
        selection = self.replay.choose(drawn, keys.answer_choice, step, f"replay step {number}, answer")
        weighted = keys.weight == "one_minus_pass_rate"
        names = [slot.question.id for slot in selection.slots]
        pass_rates = experience.running_pass_rates(names).tolist() if weighted else [0.0] * len(names)
        sequences = stored_sequences(selection.slots, pass_rates, self.config)
        record.sequences += sequences
        record.slots += selection.slots
        record.ages += [step - slot.stored.step for slot in selection.slots if slot.stored]
        record.num_scored += selection.num_scored
        record.num_padded += selection.num_padded
        return sequences
