"""Every metric a run writes, with unit and meaning; docs/metrics.md is generated from `METRICS` (`make docs`)."""

from __future__ import annotations

from dataclasses import dataclass

RATIO_STATS: dict[str, str] = {
    "min": "smallest",
    "p01": "1% quantile",
    "p50": "median",
    "p99": "99% quantile",
    "max": "largest",
    "ess": "effective sample size / tokens, (sum w)^2 / (n sum w^2), of the",
    "k1": "KL(old, new) in nats a token, estimated as the mean of -log w, by the",
    "k3": "KL(old, new) in nats a token, estimated as the mean of w - 1 - log w, by the",
}


@dataclass(frozen=True)
class Metric:
    """What one metric counts."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/pass_rate": Metric("share", "correct answers among all of the step, replayed ones included"),
    "reward/pass_rate_fresh": Metric("share", "correct answers among those sampled in the step"),
    "reward/mean": Metric("", "mean reward of the sampled answers (env.reward_function only)"),
    "reward/correct": Metric("answers", "sampled answers that were correct"),
    "reward/wrong": Metric("answers", "sampled answers with a readable final answer that was wrong"),
    "reward/no_box": Metric("answers", "rejected: no closed \\boxed{}"),
    "reward/not_literal": Metric("answers", "rejected: the box is no plain number or fraction"),
    "reward/too_long": Metric("answers", "rejected: the boxed text is too long"),
    "reward/timeout": Metric("answers", "given up: the verifier ran past its time and was killed"),
    "reward/error": Metric("answers", "given up: the verifier failed or died"),
    "reward/length_penalty": Metric("", "mean penalty of the sampled answers (grpo.reward_shaping only)"),
    "groups/none_correct": Metric("share", "groups of the step without a correct answer (no gradient but a penalty's)"),
    "groups/mixed": Metric("share", "groups of the step with correct and other answers"),
    "groups/all_correct": Metric("share", "groups of the step with every answer correct (no gradient but a penalty's)"),
    "demonstrations/members": Metric("answers", "demonstrations in groups of the step (demonstrations.enabled only)"),
    "demonstrations/wrong": Metric("answers", "of these: graded as not correct"),
    "repo/groups": Metric("groups", "off-policy groups trained on in the step (here and below: repo.enabled only)"),
    "repo/mixed_groups": Metric("groups", "of these: with rewards that differ, so that they have an advantage"),
    "repo/answers": Metric("answers", "answers in these groups"),
    "repo/kept_answers": Metric("answers", "answers kept after the step, over all ranks"),
    "repo/refused": Metric("answers", "not kept so far: without exactly one finite log-prob a token"),
    "experience/replay_on": Metric(
        "0 or 1",
        "1: the step replays: it is of the mixed phase, or stored answers are trained on beside groups",
    ),
    "experience/replayed_questions": Metric("questions", "questions of the step that were drawn from experience"),
    "experience/drawable_questions": Metric(
        "questions",
        "those in the buffer that the step could draw from, within difficulty_range and entropy_percentile: for its "
        "groups, or, with strategy replay_step, for its last replay step",
    ),
    "experience/buffer_questions": Metric("questions", "questions in the buffer after the step"),
    "experience/stored_answers": Metric("answers", "answers in the buffer after the step"),
    "experience/stored_bytes": Metric("bytes", "their size on disk"),
    "experience/shard_answers": Metric("answers", "those of them kept by the data-parallel rank that has most"),
    "experience/evicted_of_question": Metric("answers", "evicted in the step by experience.max_answers_per_question"),
    "experience/evicted_of_answers": Metric("answers", "evicted in the step by experience.max_answers"),
    "experience/evicted_of_bytes": Metric("answers", "evicted in the step by experience.max_bytes"),
    "experience/damaged": Metric("answers", "lost so far to damaged files (on_corruption: quarantine)"),
    "experience/retired": Metric("questions", "retired questions: those brought back are none"),
    "experience/retired_this_step": Metric("questions", "questions retired in the step"),
    "experience/returned": Metric("questions", "retired questions brought back so far (return_retired only)"),
    "experience/returned_this_step": Metric("questions", "retired questions brought back after the step"),
    "experience/stored_this_step": Metric("answers", "correct answers stored in the step"),
    "experience/already_stored": Metric("answers", "correct answers of the step that were stored before"),
    "experience/not_collected": Metric("answers", "correct answers of the step from before collection begins"),
    "experience/truncated": Metric("answers", "correct answers cut off and so not stored (overlong_filtering only)"),
    "experience/refused": Metric("answers", "answers refused in the step: not one finite log-prob a token"),
    "experience/retired_again": Metric("groups", "groups of the step whose question was retired before"),
    "experience/replayed_wrong": Metric("answers", "replayed answers of the step that were not graded correct again"),
    "experience/scored_answers": Metric("answers", "stored answers of drawn questions scored to choose among them"),
    "experience/padded_logprobs": Metric("tokens", "log-probs padded in the step (stored_answer: text only)"),
    "experience/mean_age_steps": Metric("steps", "mean steps since the replayed answers were stored (prefilled: at 0)"),
    "experience/bucket_<k>": Metric(
        "questions",
        "questions in the buffer, by experience.difficulty (last_group: k were correct in the last that had any)",
    ),
    "freshness/data_left": Metric("share", "training questions that are not retired after the step"),
    "freshness/steps_left": Metric(
        "steps", "until every question is retired, at the mean net retirement of the last alarms.average_steps steps"
    ),
    "freshness/epochs_left": Metric(
        "epochs", "the same: steps_left x new questions a step (mean of those steps) / questions of the next epoch"
    ),
    **{
        f"freshness/age_steps_{stat}": Metric("steps", f"{stat} of the steps since replayed answers were stored")
        for stat in ("mean", "median", "max")
    },
    **{
        f"freshness/age_versions_{stat}": Metric(
            "versions", f"{stat} of the optimiser steps since the weights that wrote them (prefilled ones left out)"
        )
        for stat in ("mean", "median", "max")
    },
    "freshness/duplicates": Metric("share", "correct new answers of the step that were stored before, token by token"),
    "freshness/repeated": Metric(
        "share", "replayed questions of the step that were replayed in the alarms.repeat_steps steps before it too"
    ),
    "freshness/uses_per_answer": Metric("replays", "replays in the run so far for each answer stored so far"),
    "alarm/<name>": Metric("0 or 1", "1: experience.alarms.<name> rings, for every alarm that is on"),
    "guards/crossed": Metric("limits", "limits of experience.guards crossed in the step (where any is set)"),
    "guards/crossings": Metric("steps", "steps so far that crossed one"),
    "guards/held": Metric("0 or 1", "1: a guard held the step to a clip, or to on-policy training"),
    "guards/capped_tokens": Metric(
        "tokens",
        "replayed tokens that a guard's clip left without a gradient, in all optimiser steps (action: clip)",
    ),
    "replay_step/answers": Metric("answers", "stored answers trained on beside the groups (strategy: not exgrpo)"),
    "replay_step/updates": Metric("updates", "optimiser steps on them; 0: nothing is stored, or they join others"),
    "replay_step/loss": Metric("", "loss, mean over these optimiser steps"),
    "replay_step/grad_norm": Metric("", "global L2 norm of the gradient before clipping, largest of them"),
    "replay_step/learning_rate": Metric("", "learning rate of the last of them"),
    "replay_step/skipped_updates": Metric("updates", "those skipped: loss or norm not finite, or norm too large"),
    "replay_step/mean_weight": Metric("", "mean weight of these answers: 1 - running pass rate, or 1"),
    "replay_step/mean_push": Metric(
        "",
        "by how much of its weight a token's log-prob is pushed, mean, a guard's cap aside; new tokens: 1 at w = 1",
    ),
    "replay_step/mean_age_steps": Metric("steps", "mean steps since these answers were stored"),
    "replay_step/clamped_ratios": Metric("tokens", "log-ratios of theirs beyond loss_fn.max_abs_log_ratio, clamped"),
    **{
        f"ratio_replay_step/{stat}": Metric(
            "", f"{words} ratio w of the tokens of replay steps, against their recorded log-probs"
        )
        for stat, words in RATIO_STATS.items()
    },
    "budget/answers": Metric("answers", "new answers generated so far, without evaluations"),
    "budget/tokens": Metric("tokens", "response tokens generated so far"),
    "budget/stored_answers": Metric("answers", "stored answers and demonstrations trained on, each time they were"),
    "budget/optimizer_steps": Metric("updates", "optimiser steps applied so far, replay steps included"),
    "policy/loss": Metric("", "loss, mean over the optimiser steps of the step (here and below: on new answers)"),
    "policy/entropy": Metric("nats", "mean entropy over response tokens, before their optimiser step"),
    "policy/entropy_fresh": Metric("nats", "the same over new response tokens"),
    "policy/entropy_replayed": Metric("nats", "the same over replayed tokens"),
    "policy/grad_norm": Metric("", "global L2 norm of the gradient before clipping, largest of the step"),
    "policy/learning_rate": Metric("", "learning rate of the last optimiser step"),
    "policy/skipped_updates": Metric(
        "updates", "optimiser steps of the step skipped: loss or norm not finite, or norm too large"
    ),
    "policy/clip_share": Metric("share", "new response tokens whose gradient the PPO clip removed"),
    "policy/padding_share": Metric("share", "positions of the training micro-batches that held padding"),
    "policy/clamped_ratios": Metric("tokens", "log-ratios used beyond loss_fn.max_abs_log_ratio, clamped"),
    "policy/version": Metric("", "version of the weights after the step"),
    **{
        f"ratio_fresh/{stat}": Metric("", f"{words} ratio w of new response tokens")
        for stat, words in RATIO_STATS.items()
    },
    **{
        f"ratio_replayed/{stat}": Metric("", f"{words} ratio w of replayed tokens, against their recorded log-probs")
        for stat, words in RATIO_STATS.items()
    },
    "ratio_replayed/shaped": Metric(
        "", "mean of f(w) over replayed tokens of groups (experience.shaping: ratio, or demonstrations; else none)"
    ),
    **{
        f"ratio_engine/{stat}": Metric(
            "", f"{words} ratio of new response tokens, policy before the update to rollout engine (recomputed only)"
        )
        for stat, words in RATIO_STATS.items()
    },
    "correction/mean": Metric("", "mean weight of new response tokens (use_importance_sampling_correction only)"),
    "correction/max": Metric("", "largest of these weights"),
    "correction/limited_share": Metric("share", "new response tokens whose weight a limit changed or set to 0"),
    "correction/ess": Metric("share", "effective sample size / tokens, (sum w)^2 / (n sum w^2), of the weights"),
    "rollout/answers": Metric("answers", "responses sampled in the step, the budget at which runs are compared"),
    "rollout/tokens": Metric("tokens", "response tokens sampled in the step"),
    "rollout/response_length": Metric("tokens", "mean length of the sampled responses"),
    "rollout/truncated": Metric("answers", "sampled responses cut off at the longest length"),
    "rollout/tokens_per_s": Metric("tokens/s", "sampled response tokens over the time of the rollout"),
    "rollout/engine_restarts": Metric("restarts", "failed rollout engines replaced in the run so far (vllm only)"),
    "agreement/max_abs_difference": Metric(
        "nats",
        "largest difference of a token's log-prob between engine and actor after the step's update",
    ),
    "agreement/mean_abs_difference": Metric("nats", "mean difference of a token's log-prob between engine and actor"),
    "agreement/kl": Metric("nats", "KL(engine, actor) a token, estimated from the engine's samples"),
    "agreement/tokens": Metric("tokens", "tokens compared"),
    "agreement/beyond_limits": Metric(
        "0 or 1", "1: a limit of policy.generation.vllm_cfg.agreement was passed on some rank"
    ),
    "data/epoch": Metric("epochs", "epoch, from 0, of the questions taken last"),
    "data/questions_left": Metric("questions", "questions the next epoch will have"),
    "data/discarded": Metric("questions", "new questions thrown away in the step (unused_fresh: discard only)"),
    "data/retired_kept": Metric("questions", "retired in the step, yet still among the new ones: too few are left"),
    "time/draw_s": Metric("s", "drawing the questions (this and the next: of the slowest rank)"),
    "time/select_s": Metric("s", "scoring stored answers and choosing among them"),
    "time/rollout_s": Metric("s", "sampling"),
    "time/reward_s": Metric("s", "verifying answers"),
    "time/old_logprobs_s": Metric("s", "recomputing the denominators of the ratio"),
    "time/update_s": Metric("s", "forward, backward and optimiser"),
    "time/replay_step_s": Metric("s", "replay steps: drawing, reading, forward, backward and optimiser"),
    "time/push_s": Metric("s", "handing new weights to the rollout engine"),
    "time/record_s": Metric("s", "recording groups into experience"),
    "time/other_s": Metric("s", "the rest of the step: on one rank all of these add up to the next"),
    "time/step_s": Metric("s", "the whole step, without evaluation and checkpoints"),
    "time/evaluate_s": Metric("s", "the evaluation after the step"),
    "time/compare_s": Metric("s", "comparing the engine with the actor after the step, or before it (vllm only)"),
    "time/save_s": Metric(
        "s", "how long training stood still before the step to take a checkpoint, or to make one whole"
    ),
    "time/save_write_s": Metric(
        "s", "writing the checkpoint that became whole before the step, in the background (async_save) or not"
    ),
    "validation/pass_rate_t1": Metric("share", "held-out pass rate of answers sampled at eval.temperature"),
    "validation/pass_rate_greedy": Metric("share", "held-out pass rate of greedy decoding"),
    "validation/reward_t1": Metric("", "mean reward of answers sampled at eval.temperature (env.reward_function only)"),
    "validation/reward_greedy": Metric("", "mean reward of greedy decoding (env.reward_function only)"),
    "validation/response_length": Metric("tokens", "mean length of the sampled held-out responses"),
    "validation/truncated": Metric("answers", "sampled held-out responses cut off at the longest length"),
    "validation/pass_rate_t1/<category>": Metric("share", "the same, of one category of questions"),
    "validation/pass_rate_greedy/<category>": Metric("share", "the same, of one category of questions"),
    "validation/avg/<set>": Metric("share", "avg@k of a set of eval.sets (here and below: in_training only)"),
    "validation/maj/<set>": Metric("share", "maj@k of a set with several samples a question"),
    "validation/pass/<set>": Metric("share", "pass@k of such a set, with /k behind its name, for every k of pass_at"),
    "validation/macro_avg/<group>": Metric("share", "mean of avg@k over the sets that name this group, ID or OOD"),
    "sft/loss": Metric("nats", "supervised fine-tuning: mean negative log-prob of a target token"),
    "sft/learning_rate": Metric("", "supervised fine-tuning: learning rate"),
    "sft/grad_norm": Metric("", "supervised fine-tuning: global L2 norm of the gradient before clipping"),
    "sft/skipped_updates": Metric(
        "updates", "supervised fine-tuning: 1 where loss or norm was not finite or too large"
    ),
    "run/segments_gib": Metric("GiB", "segments of stored answers, with those that were dropped and not yet compacted"),
    "run/rss_gib": Metric("GiB", "resident memory of rank 0's process"),
}
"""By name. A name ending in `<...>` is a family: any ending in its place (digits only for `<k>`)."""


def find_metric(name: str) -> Metric | None:
    """The metric or family `name` belongs to; None for an unknown name."""
    if "<" in name:
        return None
    if name in METRICS:
        return METRICS[name]
    for family, metric in METRICS.items():
        prefix, mark, placeholder = family.partition("<")
        ending = name.removeprefix(prefix)
        if mark and ending and ending != name and (placeholder != "k>" or ending.isdecimal()):
            return metric
    return None


def metrics_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Written once a step to `<run>/metrics.jsonl` (one JSON object a line, with `step`), and under the same names",
        "to TensorBoard (unless turned off), W&B and MLflow (where turned on, [loggers.md](loggers.md)). An evaluation",
        "has a line of its own with the step after which it ran (0: before the first). A value that was not finite is",
        "`null`. A ratio is a token's w = exp(logp_new - logp_old).",
        "",
        "This file is generated: change `exgrpo_megatron/metrics.py`, then run `make docs`.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in METRICS.items()]
    return "\n".join(lines) + "\n"
