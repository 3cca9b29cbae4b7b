"""What is kept of a run's answers, when replay starts, and what is replayed."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from exgrpo_megatron.config.choices import (
    DEFAULT_BETA,
    SHAPING_MEANING,
    AnswerChoice,
    BucketWeight,
    Shaping,
    check_beta,
)
from exgrpo_megatron.config.replay_step import ReplayStepConfig
from exgrpo_megatron.config.section import Name, PositiveFloat, PositiveInt, Section, Share, key

Eviction = Literal["oldest", "highest_entropy", "least_recently_replayed"]


class ExperienceConfig(Section):
    """What is kept, when replay starts, and what is replayed."""

    enabled: bool = key(True, "false: on-policy GRPO, nothing stored or replayed")
    strategy: Literal["exgrpo", "replay_step", "both"] = key(
        "exgrpo",
        "exgrpo: a stored answer joins the group of a drawn question (Algorithm 1 of the paper); replay_step: all "
        "questions are new, and an optimiser step on stored answers follows (experience.replay_step); both",
    )
    replay_step: ReplayStepConfig = key(ReplayStepConfig(), "the optimiser step on stored answers (strategy)")
    replay_ratio: Share = key(0.5, "share of a step's questions drawn from experience (rho)")
    start_pass_rate: Share | None = key(
        0.35, "replay starts after a step whose pass rate is above this (strict); null: from the first step"
    )
    bucket_weight: BucketWeight | None = key(
        None,
        "weight of a bucket with k of K correct. counts: normal(k; K/2, bucket_sigma); accuracy: "
        "normal(k/K; 0.5, bucket_sigma); linear: k/K; sqrt: sqrt(k/K); linear_clip: min(k/K, 0.5); uniform: every "
        "stored question alike; null: as the variant says",
    )
    bucket_sigma: PositiveFloat = key(
        1.0, "width of the normal bucket weights, in counts or accuracy; the other weights have none"
    )
    answer_choice: AnswerChoice | None = key(
        None, "which stored answer of a drawn question is replayed, under the current policy; null: as the variant says"
    )
    stored_answer: Literal["tokens", "text"] | None = key(
        None, "text: re-tokenised from text as in the released code, log-probs padded; null: as the variant says"
    )
    collect_from: Literal["start", "mixed_phase"] | None = key(
        None, "when correct answers begin to be stored; null: as the variant says"
    )
    retire_from: Literal["replay", "replay_and_fresh", "never"] | None = key(
        None,
        "where a question with all K correct no longer appears: among replayed ones, or from the next epoch on among "
        "new ones too, of which a batch and 20 always stay; never: it stays everywhere, in bucket K - 1, and its "
        "answers are stored; null: as the variant says, but never with strategy replay_step",
    )
    unused_fresh: Literal["keep", "discard"] | None = key(
        None, "new questions displaced by replayed ones: keep in line, or throw away; null: as the variant says"
    )
    allow_duplicates: bool | None = key(
        None, "a question may stand in a batch both as new and as replayed; null: as the variant says"
    )
    shaping: Shaping = key("ratio", f"what a replayed token of a group has in place of its ratio w. {SHAPING_MEANING}")
    shaping_beta: PositiveFloat = key(DEFAULT_BETA, "b of the two ratio shapings")
    prefill_path: Name | None = key(
        None, "experience file of another run, or made by `exgrpo prefill`, to begin with", "path"
    )
    max_answers_per_question: PositiveInt | None = key(None, "stored answers of one question; null: any", "answers")
    max_answers: PositiveInt | None = key(None, "stored answers of all questions and ranks; null: any", "answers")
    max_bytes: PositiveInt | None = key(
        None, "bytes of the stored answers of all ranks, compressed; null: any", "bytes"
    )
    eviction: Eviction = key(
        "oldest",
        "which answers go beyond those limits. oldest: stored first; highest_entropy: largest mean of -log-prob as "
        "recorded, which estimates the entropy; least_recently_replayed: longest since it was replayed, or stored",
    )
    store_dir: Name | None = key(
        None,
        "working folder of the stored answers, on a local disk if there is one; null: <logger.log_dir>/experience",
        "path",
    )
    on_corruption: Literal["refuse", "quarantine"] = key(
        "refuse",
        "a stored answer that is not what was written ends the run (refuse), or is dropped and counted, and its file "
        "set aside (quarantine)",
    )

    @property
    def in_groups(self) -> bool:
        """Whether stored answers join groups, once replay is on."""
        return self.enabled and self.strategy != "replay_step"

    @property
    def in_steps(self) -> bool:
        """Whether stored answers are trained on beside the groups, once replay steps begin."""
        return self.enabled and self.strategy != "exgrpo"

    @property
    def pass_rate_decay(self) -> float | None:
        """Of the running pass rates that are kept; None: nobody asks for them."""
        weighs = self.in_steps and self.replay_step.weight == "one_minus_pass_rate"
        return self.replay_step.pass_rate_decay if weighs else None

    @model_validator(mode="after")
    def _shaping_has_its_keys(self) -> ExperienceConfig:
        check_beta(self.shaping, self.shaping_beta)
        return self

    @model_validator(mode="after")
    def _eviction_has_a_limit(self) -> ExperienceConfig:
        limits = (self.max_answers_per_question, self.max_answers, self.max_bytes)
        if self.eviction != "oldest" and limits == (None, None, None):
            raise ValueError(
                f"eviction = {self.eviction!r} has no effect while max_answers_per_question, max_answers and max_bytes "
                "are null: set one of them, or eviction back"
            )
        return self
