"""What is kept of a run's answers, when replay starts, and what is replayed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from exgrpo_megatron.config.alarms import AlarmsConfig
from exgrpo_megatron.config.choices import (
    DEFAULT_BETA,
    NORMAL_WEIGHTS,
    SHAPING_MEANING,
    AnswerChoice,
    BucketWeight,
    Shaping,
    check_beta,
)
from exgrpo_megatron.config.guards import GuardsConfig
from exgrpo_megatron.config.replay_step import ReplayStepConfig
from exgrpo_megatron.config.section import Name, PositiveFloat, PositiveInt, Section, Share, key

Difficulty = Literal["last_group", "window", "reward_variance"]
Eviction = Literal["oldest", "highest_entropy", "least_recently_replayed"]


class ReturnRetiredConfig(Section):
    """How retired questions are brought back: to new sampling, and to replay once a new answer of them is stored."""

    share: Annotated[float, Field(gt=0, le=1)] = key(
        ..., "share of the retired questions brought back at a time, rounded down but at least one, drawn at random"
    )
    period: PositiveInt = key(..., "steps between two times", "steps")


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
    replay_probability: Share = key(
        1.0,
        "probability with which a step replays, in groups or replay steps, while they are on, from the run's seed; "
        "the other steps are on-policy",
    )
    start_pass_rate: Share | None = key(
        0.35,
        "replay starts after a step whose pass rate of new questions is above this (strict); null, with no other "
        "start: from the first step; where start_epoch or start_step is given, the default is null",
    )
    start_epoch: PositiveInt | None = key(
        None, "replay starts with the first step whose new questions begin in this epoch, counted from 0", "epoch"
    )
    start_step: PositiveInt | None = key(None, "replay starts with this step, counted from 1", "step")
    stop_pass_rate: Share | None = key(
        None,
        "replay stops after a step whose pass rate of new questions is below this (strict), and starts again as at "
        "first; null: never",
    )
    pass_rate_steps: PositiveInt = key(
        1,
        "the two pass rates are compared with the mean of so many steps, all since replay went on or off",
        "steps",
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
    difficulty: Difficulty = key(
        "last_group",
        "a question's rate, and its bucket k = rate * K, rounded, in 1..K-1. last_group: k of K in its last group with "
        "a right answer; window: share of right ones among its last difficulty_window new answers; reward_variance: "
        "that of right and wrong answers with the variance of the last group's rewards, on the side of their mean",
    )
    difficulty_window: Annotated[int, Field(ge=1, le=128)] | None = key(
        None, "new answers of a question that its rate is taken over (difficulty: window)", "answers"
    )
    difficulty_reward_range: tuple[float, float] = key(
        (0.0, 1.0), "rewards of the worst and the best answer (difficulty: reward_variance)"
    )
    difficulty_range: tuple[Share, Share] | None = key(
        None, "draw only questions whose rate is from the first to the second value, both included; null: any"
    )
    difficulty_range_unit: Literal["rate", "quantile"] = key(
        "rate", "difficulty_range is of rates, or of quantiles of the stored questions' rates, which adapt to them"
    )
    difficulty_per_category: bool = key(
        False,
        "every category takes part by its stored questions, and within it bucket weights go by the rank of a rate "
        "among its questions' and quantiles are its own (data.train.category_key names the column)",
    )
    answer_choice: AnswerChoice | None = key(
        None,
        "which stored answer of a drawn question is replayed. lowest_...: by the measure named, under the current "
        "policy; shortest: fewest tokens; newest: stored last; agreement: most like the question's other answers, by "
        "the pairs of neighbouring tokens that two have in common; random: any; null: as the variant says",
    )
    entropy_percentile: Annotated[float, Field(gt=0, lt=100)] | None = key(
        None,
        "draw only questions whose lowest recorded entropy of an answer (mean of -log-prob) is among the lowest so "
        "many percent of all stored questions', and of their answers only those within that limit; null: any",
        "percent",
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
    solved_above: float | None = key(
        None,
        "a question is solved, and retired, when every reward of its group is above this, and else stays in bucket "
        "K - 1 (env.reward_function only); null: when every answer is correct",
    )
    return_retired: ReturnRetiredConfig | None = key(None, "bring retired questions back; null: retired for good")
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
    guards: GuardsConfig = key(GuardsConfig(), "limits of steps that replay")
    alarms: AlarmsConfig = key(AlarmsConfig(), "warnings when data or experience runs dry or grows stale")

    @model_validator(mode="before")
    @classmethod
    def _start_replaces_the_default(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "start_pass_rate" in raw:
            return raw
        elsewhere = any(raw.get(name) is not None for name in _OTHER_STARTS)
        return {**raw, "start_pass_rate": None} if elsewhere else raw

    @model_validator(mode="after")
    def _one_start(self) -> ExperienceConfig:
        names = ("start_pass_rate", *_OTHER_STARTS)
        given = [f"{name} = {getattr(self, name)}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: replay starts once; keep one of them, the others null")
        return self

    @model_validator(mode="after")
    def _some_are_retired(self) -> ExperienceConfig:
        if self.return_retired is not None and self.retire_from == "never":
            raise ValueError("return_retired is set, but retire_from = 'never' retires nothing: set one of them back")
        return self

    @model_validator(mode="after")
    def _solved_means_retired(self) -> ExperienceConfig:
        if self.solved_above is not None and self.retire_from == "never":
            raise ValueError(
                f"solved_above = {self.solved_above}, but retire_from = 'never' retires nothing: set one of them back"
            )
        return self

    @model_validator(mode="after")
    def _switch_has_two_ways(self) -> ExperienceConfig:
        start, stop = self.start_pass_rate, self.stop_pass_rate
        if stop is not None and start is None:
            raise ValueError(
                f"stop_pass_rate = {stop}, but start_pass_rate is null: it says when replay goes on again; set it"
            )
        if stop is not None and start is not None and stop > start:
            raise ValueError(
                f"stop_pass_rate = {stop} is above start_pass_rate = {start}: between them replay would go on and off "
                "every step"
            )
        if start is None and self.pass_rate_steps != 1:
            raise ValueError(
                f"pass_rate_steps = {self.pass_rate_steps} has no effect while start_pass_rate is null: set one of them"
            )
        return self

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
    def _sigma_has_a_normal(self) -> ExperienceConfig:
        weight, default = self.bucket_weight, type(self).model_fields["bucket_sigma"].default
        if weight is not None and weight not in NORMAL_WEIGHTS and self.bucket_sigma != default:
            raise ValueError(
                f"bucket_sigma = {self.bucket_sigma} has no effect with bucket_weight = {weight!r}: set one of them "
                "back"
            )
        return self

    @model_validator(mode="after")
    def _choice_of_questions_is_whole(self) -> ExperienceConfig:
        if (self.difficulty == "window") != (self.difficulty_window is not None):
            raise ValueError(
                f"difficulty = {self.difficulty!r} with difficulty_window = {self.difficulty_window}: a window needs "
                "its number of answers, and is for difficulty = 'window' alone"
            )
        worst, best = self.difficulty_reward_range
        if self.difficulty != "reward_variance" and (worst, best) != (0.0, 1.0):
            raise ValueError(
                f"difficulty_reward_range = {[worst, best]} has no effect with difficulty = {self.difficulty!r}: set "
                "it back, or difficulty to 'reward_variance'"
            )
        if not worst < best:
            raise ValueError(f"difficulty_reward_range = {[worst, best]}: the first must be below the second")
        return self

    @model_validator(mode="after")
    def _range_is_one(self) -> ExperienceConfig:
        if self.difficulty_range is None and self.difficulty_range_unit != "rate":
            raise ValueError(
                f"difficulty_range_unit = {self.difficulty_range_unit!r} has no effect while difficulty_range is null: "
                "set it, or the unit back"
            )
        if self.difficulty_range is not None and not self.difficulty_range[0] < self.difficulty_range[1]:
            raise ValueError(f"difficulty_range = {list(self.difficulty_range)}: the first must be below the second")
        return self

    @model_validator(mode="after")
    def _difficulty_has_an_effect(self) -> ExperienceConfig:
        of_groups = {self.bucket_weight} if self.strategy != "replay_step" else set()
        of_steps = {self.replay_step.bucket_weight} if self.strategy != "exgrpo" else set()
        if of_groups | of_steps != {"uniform"}:
            return self
        if self.difficulty != "last_group" and self.difficulty_range is None:
            raise ValueError(
                f"difficulty = {self.difficulty!r} has no effect with bucket_weight = 'uniform' and no "
                "difficulty_range: set a range or another weight, or difficulty back to 'last_group'"
            )
        if self.difficulty_per_category and self.difficulty_range_unit != "quantile":
            raise ValueError(
                "difficulty_per_category = true has no effect with bucket_weight = 'uniform' and no difficulty_range "
                "in quantiles: set one or another weight, or difficulty_per_category = false"
            )
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


_OTHER_STARTS = ("start_epoch", "start_step")
