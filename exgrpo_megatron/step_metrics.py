"""The numbers of one training step, reduced over data-parallel ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import psutil

from exgrpo_megatron.algorithm.batch import objective
from exgrpo_megatron.algorithm.importance import correction
from exgrpo_megatron.algorithm.length_penalty import length_penalty
from exgrpo_megatron.algorithm.replay_step import replay_objective
from exgrpo_megatron.budget import Budget
from exgrpo_megatron.comm import all_gather_concat
from exgrpo_megatron.config import Config, LossConfig
from exgrpo_megatron.experience.history import Event
from exgrpo_megatron.experience.reports import RecordReport
from exgrpo_megatron.parts import Parts
from exgrpo_megatron.places import Places
from exgrpo_megatron.ratio_metrics import mean_shaped, ratio_summary
from exgrpo_megatron.replay_step_metrics import ReplayStepRecord, replay_step_metrics
from exgrpo_megatron.retirement import Retired
from exgrpo_megatron.rewards.alarm import verdict_counts
from exgrpo_megatron.rewards.verifier import Verdict
from exgrpo_megatron.types import Group, LossTerms, Trajectory, UpdateResult

MAX_NAMED = 5
"""Refused answers that a warning names; all are counted."""
PHASES = ("draw", "select", "rollout", "reward", "old_logprobs", "record", "update", "replay_step", "push")


@dataclass
class StepClock:
    """Wall-clock seconds of each phase of one step, on this rank, which says meanwhile that it is there."""

    step: int
    places: Places
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to the phase."""
        begin = time.perf_counter()
        with self.places.inside(f"step {self.step}: {name}"):
            yield
        self.seconds[name] += time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        named = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        whole = time.perf_counter() - self.started
        return {**named, "time/other_s": whole - sum(named.values()), "time/step_s": whole}


@dataclass(frozen=True)
class StepRecord:
    """What `Trainer.step` did, the same on every rank but for the terms inside `updates`."""

    groups: list[Group]
    verdicts: list[Verdict]
    """Of the new answers."""
    updates: list[UpdateResult]
    """On new answers, and the stored ones among them."""
    stored: ReplayStepRecord
    """What was trained on stored answers beside the groups."""
    report: RecordReport
    replay_ages: list[int]
    """Steps since each replayed answer was stored."""
    num_scored: int
    num_padded: int
    num_discarded: int
    """New questions thrown away."""
    num_drawable: int
    """Stored questions that the step could draw from."""
    retired: Retired
    num_capped: int
    """Replayed tokens that a guard's clip left without a gradient, once for each of these optimiser steps."""
    mixed: bool
    total_skipped: int
    """Optimiser steps skipped in the run so far."""
    budget: Budget
    """The step included."""
    off_policy: list[Group] = field(default_factory=list)
    """Groups of replayed answers alone."""


def step_metrics(parts: Parts, record: StepRecord, clock: StepClock) -> dict[str, float]:
    """Every metric of the step, by its name in `metrics.METRICS`; collective over data-parallel ranks."""
    timing = _slowest(parts.comm.all_gather(clock.metrics()))
    return {
        **_reward_metrics(parts.config, record),
        **_group_metrics(record.groups),
        **_experience_metrics(parts, record),
        **_repo_metrics(parts, record.off_policy),
        **_update_metrics(parts, record),
        **record.budget.metrics(parts.policy.version),
        **_engine_ratio_metrics(parts.config.loss_fn, record.groups),
        **_rollout_metrics(record.groups, timing["time/rollout_s"]),
        "rollout/engine_restarts": parts.engine.num_restarts,
        "data/epoch": parts.order.epoch,
        "data/questions_left": parts.order.num_active,
        "data/discarded": record.num_discarded,
        "data/retired_kept": len(record.retired.kept),
        "run/rss_gib": psutil.Process().memory_info().rss / 2**30,
        **timing,
    }


def step_warnings(config: Config, record: StepRecord) -> list[str]:
    """What of the step somebody should look at, beside the rewards."""
    warnings = []
    updates = [*record.updates, *record.stored.updates]
    skipped = [update for update in updates if update.skipped]
    if skipped:
        found = "; ".join(f"loss {update.loss:.4g}, gradient norm {update.grad_norm:.4g}" for update in skipped)
        warnings.append(
            f"{len(skipped)} of {len(updates)} optimiser steps skipped, {record.total_skipped} so far, for a "
            f"loss or norm that is not finite or a norm above policy.skip_grad_norm_above: {found}"
            f"{'' if config.debug.enabled else '; `exgrpo train --debug` keeps the batch of such a step'}"
        )
    refused = record.report.refused
    if refused:
        named = "; ".join(f"question {answer.question_id!r}: {answer.reason}" for answer in refused[:MAX_NAMED])
        warnings.append(f"{len(refused)} correct answers cannot be stored for replay: {named}")
    return warnings


def step_events(parts: Parts, record: StepRecord) -> list[Event]:
    """What happened to the questions of the step, in this order: tried, replayed, what the record says, and what came
    after it; collective over data-parallel ranks. Nothing where `logger.experience_history` is false."""
    if not parts.config.logger.experience_history:
        return []
    mine = [answer for update in [*record.updates, *record.stored.updates] for answer in update.replayed]
    replayed = sorted(all_gather_concat(parts.comm, mine))
    return [
        *(Event(group.question.id, "tried", count=group.num_correct, of=group.size) for group in record.groups),
        *(
            Event(name.question_id, "replayed", answer=name.serial, mean_ratio=mean, max_ratio=largest)
            for name, mean, largest in replayed
        ),
        *record.report.events,
        *parts.experience.take_events(),
    ]


def pass_rate(groups: list[Group]) -> float:
    """Share of correct members over all groups, replayed members included."""
    return sum([group.num_correct for group in groups]) / sum([group.size for group in groups])


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The longest of each time: every rank waits for the slowest, outside of the phase that made it wait."""
    return {name: max(seconds[name] for seconds in ranks) for name in ranks[0]}


def _repo_metrics(parts: Parts, off_policy: list[Group]) -> dict[str, float]:
    if parts.recent is None:
        return {}
    rewards = [{member.reward for member in group.trajectories} for group in off_policy]
    return {
        "repo/groups": len(off_policy),
        "repo/mixed_groups": sum(len(different) > 1 for different in rewards),
        "repo/answers": sum(group.size for group in off_policy),
        "repo/kept_answers": parts.recent.num_answers(),
        "repo/refused": sum(parts.comm.all_gather(parts.recent.num_refused)),
    }


def _new_answers(groups: list[Group]) -> list[Trajectory]:
    return [member for group in groups for member in group.trajectories if not member.replayed]


def _reward_metrics(config: Config, record: StepRecord) -> dict[str, float]:
    fresh = _new_answers(record.groups)
    shaped = config.grpo.reward_shaping.enabled
    penalties = [length_penalty(len(member.token_ids), config) for member in fresh] if shaped else []
    return {
        **({"reward/length_penalty": float(np.mean(penalties))} if shaped else {}),
        "reward/pass_rate": pass_rate(record.groups),
        "reward/pass_rate_fresh": sum([member.correct for member in fresh]) / len(fresh),
        **({"reward/mean": float(np.mean([member.reward for member in fresh]))} if config.env.reward_function else {}),
        **{f"reward/{status}": count for status, count in verdict_counts(record.verdicts).items()},
    }


def _group_metrics(groups: list[Group]) -> dict[str, float]:
    none = sum(group.num_correct == 0 for group in groups)
    full = sum(group.num_correct == group.size for group in groups)
    total = len(groups)
    return {
        "groups/none_correct": none / total,
        "groups/mixed": (total - none - full) / total,
        "groups/all_correct": full / total,
    }


def _experience_metrics(parts: Parts, record: StepRecord) -> dict[str, float]:
    experience, ages, report = parts.experience, record.replay_ages, record.report
    off_policy = [member for group in record.groups for member in group.trajectories if member.replayed]
    replayed, shown = ([], off_policy) if parts.demonstrations else (off_policy, [])
    sizes = Counter(experience.bucket_sizes())
    members = parts.config.grpo.num_generations_per_prompt
    kept = parts.comm.all_gather((experience.num_own_answers, experience.own_segment_bytes))
    return {
        "experience/replay_on": float(record.mixed or bool(record.stored.sequences)),
        "experience/replayed_questions": len(ages),
        "experience/drawable_questions": record.num_drawable,
        "experience/buffer_questions": experience.num_questions,
        "experience/stored_answers": experience.num_answers,
        "experience/stored_bytes": experience.num_bytes,
        "experience/shard_answers": max(answers for answers, _ in kept),
        "run/segments_gib": sum(size for _, size in kept) / 2**30,
        "experience/evicted_of_question": report.evicted_of_question,
        "experience/evicted_of_answers": report.evicted_of_answers,
        "experience/evicted_of_bytes": report.evicted_of_bytes,
        "experience/damaged": experience.num_damaged,
        "experience/retired": experience.num_retired,
        "experience/retired_this_step": len(report.retired),
        **_returned(parts.config, record),
        "experience/stored_this_step": report.stored,
        "experience/already_stored": report.duplicates,
        "experience/not_collected": report.not_collected,
        "experience/truncated": report.truncated,
        "experience/refused": len(report.refused),
        "experience/retired_again": report.already_retired,
        "experience/replayed_wrong": sum(not member.correct for member in replayed),
        **({"demonstrations/members": len(shown)} if parts.demonstrations else {}),
        **({"demonstrations/wrong": sum(not member.correct for member in shown)} if parts.demonstrations else {}),
        "experience/scored_answers": record.num_scored + record.stored.num_scored,
        "experience/padded_logprobs": record.num_padded + record.stored.num_padded,
        **({"experience/mean_age_steps": float(np.mean(ages))} if ages else {}),
        **{f"experience/bucket_{count}": sizes[count] for count in range(1, members)},
    }


def _returned(config: Config, record: StepRecord) -> dict[str, float]:
    if config.experience.return_retired is None:
        return {}
    return {
        "experience/returned": record.retired.total_returned,
        "experience/returned_this_step": record.retired.num_returned,
    }


def _update_metrics(parts: Parts, record: StepRecord) -> dict[str, float]:
    ranks = parts.comm.all_gather((record.updates, record.stored.updates))
    everyone = [update for updates, _ in ranks for update in updates]
    terms = _joined([update.terms for update in everyone])
    stored = [update.terms for _, updates in ranks for update in updates]
    return {
        **_policy_metrics(parts, record.updates, everyone, terms),
        **replay_step_metrics(parts.config, record.stored, _joined(stored) if stored else terms),
    }


def _policy_metrics(
    parts: Parts, updates: list[UpdateResult], everyone: list[UpdateResult], terms: LossTerms
) -> dict[str, float]:
    """Mean over the step's optimiser steps on new answers; ratios over all of their tokens."""
    fresh = ~terms.replayed
    return {
        "policy/loss": float(np.mean([update.loss for update in updates])),
        **_entropies(terms),
        # numpy's maximum of a NaN and a number is NaN; Python's depends on which comes first.
        "policy/grad_norm": float(np.max([update.grad_norm for update in updates])),
        "policy/learning_rate": updates[-1].learning_rate,
        "policy/skipped_updates": sum(update.skipped for update in updates),
        "policy/clip_share": float(terms.clipped[fresh].mean()) if fresh.any() else 0.0,
        "policy/padding_share": _ratio(everyone, "num_padding", "num_positions"),
        "policy/clamped_ratios": _num_clamped(parts.config, terms),
        "policy/version": parts.policy.version,
        **ratio_summary("ratio_fresh", terms.log_ratio[fresh]),
        **ratio_summary("ratio_replayed", terms.log_ratio[terms.replayed]),
        **_shaped(parts.config, terms),
    }


def _entropies(terms: LossTerms) -> dict[str, float]:
    """Means over all tokens, new ones and replayed ones, where there are any."""
    entropy, replayed = terms.entropy, terms.replayed
    found = {"": entropy, "_fresh": entropy[~replayed], "_replayed": entropy[replayed]}
    return {f"policy/entropy{name}": float(values.mean()) for name, values in found.items() if values.size}


def _shaped(config: Config, terms: LossTerms) -> dict[str, float]:
    """What f(w) makes of the ratios of replayed members of groups, clamped as in the loss; nothing where it has no
    part in the loss."""
    shown, experience = config.demonstrations, config.experience
    shaped = shown.enabled or (experience.in_groups and experience.shaping == "ratio")
    if not shaped or not terms.replayed.any():
        return {}
    bound = config.loss_fn.max_abs_log_ratio
    clamped = np.clip(terms.log_ratio[terms.replayed], -bound, bound)
    return {"ratio_replayed/shaped": mean_shaped(clamped, shown.gamma if shown.enabled else experience.shaping_beta)}


def _num_clamped(config: Config, terms: LossTerms) -> int:
    """Log-ratios that the loss clamps: those of tokens of which it uses a ratio."""
    joint = config.experience.in_steps and config.experience.replay_step.joint
    used = replay_objective(config) if joint else objective(config, mixed=True)
    beyond = np.abs(terms.log_ratio) > used.max_abs_log_ratio
    if used.shaping == "log_prob":
        beyond &= ~terms.replayed
    return 0 if used.kind == "nll" else int(beyond.sum())


def _ratio(updates: list[UpdateResult], part: str, whole: str) -> float:
    return sum(getattr(update, part) for update in updates) / max(1, sum(getattr(update, whole) for update in updates))


def _engine_ratio_metrics(loss: LossConfig, groups: list[Group]) -> dict[str, float]:
    """How far engine and policy are apart on the new answers, and what the correction makes of it."""
    fresh = [member for member in _new_answers(groups) if member.engine_logprobs is not None]
    ratios = [member.logprobs - member.engine_logprobs for member in fresh if member.engine_logprobs is not None]
    metrics = ratio_summary("ratio_engine", np.concatenate([np.zeros(0, np.float32), *ratios]))
    corrections = [found for member in fresh if (found := correction(member, loss)) is not None]
    if not corrections:
        return metrics
    weights = np.concatenate([found.weights for found in corrections]).astype(np.float64)
    limited = np.concatenate([found.limited for found in corrections])
    squares = float(np.square(weights).sum())
    return {
        **metrics,
        "correction/mean": float(weights.mean()),
        "correction/max": float(weights.max()),
        "correction/limited_share": float(limited.mean()),
        "correction/ess": float(weights.sum() ** 2 / (len(weights) * squares)) if squares else 0.0,
    }


def _joined(parts: list[LossTerms]) -> LossTerms:
    names = ("log_ratio", "entropy", "advantage", "replayed", "clipped")
    return LossTerms(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _rollout_metrics(groups: list[Group], seconds: float) -> dict[str, float]:
    fresh = _new_answers(groups)
    tokens = sum(len(member.token_ids) for member in fresh)
    return {
        "rollout/answers": len(fresh),
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / len(fresh),
        "rollout/truncated": sum(member.stop_reason == "length" for member in fresh),
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
    }
