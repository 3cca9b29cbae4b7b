"""Which questions a step has: those drawn from experience, each with the stored answer to replay, and new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from exgrpo_megatron.algorithm.chance import generator
from exgrpo_megatron.algorithm.replay_schedule import num_replayed
from exgrpo_megatron.config import AnswerChoice
from exgrpo_megatron.experience.selection import choose_answer, needs_scoring, needs_tokens
from exgrpo_megatron.experience.text_form import as_text_answer, as_text_tokens
from exgrpo_megatron.parts import Parts, score_shared
from exgrpo_megatron.types import Question, ScoredSequence, Slot, StoredAnswer, TokenIds


@dataclass(frozen=True)
class Drawn:
    """The questions of a step."""

    replayed: list[str]
    """Ids drawn from experience."""
    fresh: list[Question]
    """New questions, which fill the batch up."""
    num_discarded: int
    """New questions thrown away."""
    num_drawable: int = 0
    """Stored questions that could have been drawn."""


@dataclass(frozen=True)
class Selection:
    """The replayed slots, how many stored answers were scored for them, and how many of the replayed log-probs the text
    form made up."""

    slots: list[Slot]
    num_scored: int
    num_padded: int


class ReplayDraw:
    """Draws questions and chooses stored answers; every method is collective, and answers alike on every process."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.questions = {question.id: question for question in parts.train.questions}
        tokenizer = parts.tokenizer
        decode = partial(tokenizer.decode, special_tokens=True)
        self._text_form = (decode, tokenizer.encode, tokenizer.eos_text, tokenizer.eos_id)

    def draw(self, step: int, *, mixed: bool) -> Drawn:
        """The questions of a step; `mixed`: replay is on."""
        config, experience = self.config, self.parts.experience
        wanted = config.grpo.num_prompts_per_step
        share = num_replayed(config.experience.replay_ratio, wanted, experience.num_questions) if mixed else 0
        drawn = experience.intact(experience.draw(share, generator(config.grpo.seed, step, "draw"))) if share else []
        exclude = frozenset() if config.experience.allow_duplicates else frozenset(drawn)
        fresh = self.parts.order.take(wanted - len(drawn), exclude)
        discard = config.experience.unused_fresh == "discard"
        num_discarded = self.parts.order.discard(len(drawn)) if discard else 0
        return Drawn(drawn, fresh, num_discarded, experience.num_drawable if share else 0)

    def select(self, drawn: list[str], step: int) -> Selection:
        """For each drawn question the stored answer that joins its group."""
        choice = self.config.experience.answer_choice
        assert choice is not None
        return self.choose(drawn, choice, step, "answer")

    def choose(self, drawn: Sequence[str], choice: AnswerChoice, step: int, purpose: str) -> Selection:
        """For each drawn question a stored answer; only the drawn questions' answers are scored, if any are.

        `purpose` names the random numbers.
        """
        experience = self.parts.experience
        candidates = dict(zip(drawn, experience.candidates(drawn), strict=True))
        scoring = [name for name, found in candidates.items() if needs_scoring(choice, len(found))]
        reading = [name for name, found in candidates.items() if needs_tokens(choice, len(found))]
        tokens = self._tokens(scoring + reading, candidates)
        scored = self._scored({name: tokens[name] for name in scoring})
        rng = generator(self.config.grpo.seed, step, purpose)
        chosen = [
            (name, found[choose_answer(choice, scored.get(name, [None] * len(found)), rng, tokens.get(name, ()))])
            for name, found in candidates.items()
        ]
        replayed = [self._as_replayed(answer) for answer in experience.fetch(chosen, replayed_in=step)]
        slots = [Slot(self.questions[name], answer) for name, (answer, _) in zip(drawn, replayed, strict=True)]
        return Selection(slots, sum(map(len, scored.values())), sum(padded for _, padded in replayed))

    def _tokens(self, question_ids: list[str], candidates: dict[str, list[int]]) -> dict[str, list[TokenIds]]:
        """Question id -> token ids of its candidates, in the form in which they would be replayed."""
        as_text = self.config.experience.stored_answer == "text"
        return {
            name: [as_text_tokens(listed[i], *self._text_form) if as_text else listed[i] for i in candidates[name]]
            for name, listed in zip(question_ids, self.parts.experience.token_ids(question_ids), strict=True)
        }

    def _scored(self, candidates: dict[str, list[TokenIds]]) -> dict[str, list[ScoredSequence]]:
        """Question id -> scores of its candidates under the current policy."""
        pairs = [(name, token_ids) for name, listed in candidates.items() for token_ids in listed]
        scores = score_shared(self.parts, [(self.questions[name].prompt_ids, token_ids) for name, token_ids in pairs])
        scored: dict[str, list[ScoredSequence]] = {name: [] for name in candidates}
        for (name, _), score in zip(pairs, scores, strict=True):
            scored[name].append(score)
        return scored

    def _as_replayed(self, answer: StoredAnswer) -> tuple[StoredAnswer, int]:
        """The answer as it is replayed, and its number of made-up log-probs."""
        if self.config.experience.stored_answer == "tokens":
            return answer, 0
        return as_text_answer(answer, *self._text_form)
