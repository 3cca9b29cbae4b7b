"""Every metric a run writes, with unit and meaning, and the sinks that write them.

Metrics are written by rank 0, once a step, from values already reduced over ranks. docs/metrics.md is generated from
`METRICS` (`make docs`).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from exgrpo_megatron.errors import DataError, UserError
from exgrpo_megatron.files import replace_text

logger = logging.getLogger(__name__)

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
    "validation/macro_avg/<group>": Metric("share", "mean of avg@k over the sets of a group, ID or OOD"),
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


class MetricSink(Protocol):
    """Somewhere metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one step; NaN and infinities may be among them."""

    def truncate_after(self, step: int) -> None:
        """Forget what was written for later steps: a resumed run writes them again."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class AnswerRow:
    """One answer of a step, for people to read."""

    question_id: str
    question: str
    answer: str
    gold: str
    reward: float
    correct: bool
    replayed: bool
    tokens: int


class RunSink(MetricSink, Protocol):
    """A tool of others that has the run, with more of it than metrics."""

    title: str
    where: str
    """An address or a folder."""

    def answers(self, step: int, rows: Sequence[AnswerRow]) -> None:
        """Keep some answers of a step; comes before its metrics."""

    def finish(self, summary: Mapping[str, float | str], files: Sequence[Path]) -> None:
        """The last step is done: keep what came of the run."""

    def close(self, *, failed: bool = False) -> None: ...

    def lost(self) -> list[str]:
        """A line for each kind of thing it did not get, once it is closed."""


class JsonlSink:
    """One JSON object a line, `{"step": n, name: value, ...}`, handed over when `write` returns; NaN and inf as null.

    One step may have several lines (an evaluation, then the step); `read_metrics` joins them.
    A half-written last line, left by a killed process, is dropped on opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {path.parent}: {error.strerror}; set logger.log_dir") from error
        if path.exists() and not _ends_with_newline(path):
            replace_text(path, "".join(_whole_lines(path)))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; raises UserError where the disk refuses it."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, **values}, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise UserError(
                f"cannot write metrics to {self.path}: {error.strerror}; make room, then run again"
            ) from error

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and a half-written last line; the file is replaced in one move."""
        if self.path.exists():
            lines = _whole_lines(self.path)
            kept = [line for number, line in enumerate(lines, 1) if _parse(self.path, number, line)["step"] <= step]
            replace_text(self.path, "".join(kept))

    def close(self) -> None:
        return None


class TensorBoardSink:
    """TensorBoard scalars under the same names; NaN and infinities are left to TensorBoard, which marks them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._writer = SummaryWriter(log_dir=str(self.folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """TensorBoard files only grow: a new one is begun that tells readers to hide later steps of the older ones."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricsLogger:
    """Checks metrics and hands them to every sink."""

    def __init__(self, sinks: Sequence[MetricSink], tools: Sequence[RunSink] = ()) -> None:
        """`tools` get the metrics too, after `sinks`."""
        self._sinks, self._tools = (*sinks, *tools), tuple(tools)
        self.nonfinite_values = 0
        """NaN and infinities seen so far; each is also warned of by name."""

    def write(self, step: int, metrics: Mapping[str, float | np.number]) -> None:
        """Write the metrics of `step`. Unknown names and values that are no real number are bugs (AssertionError)."""
        values = {name: _checked(name, value) for name, value in metrics.items()}
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            self.nonfinite_values += 1
            logger.warning("metric %s of step %d is %s", name, step, values[name])
        for sink in self._sinks:
            sink.write(step, values)

    def truncate_after(self, step: int) -> None:
        """Forget later steps in every sink; call it once on resume, with the step of the checkpoint."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def answers(self, step: int, rows: Callable[[], Sequence[AnswerRow]]) -> None:
        """Hand some answers of a step to the tools, before its metrics; `rows` is asked only where there are any."""
        if self._tools:
            found = rows()
            for tool in self._tools:
                tool.answers(step, found)

    def finish(self, summary: Callable[[], Mapping[str, float | str]], files: Sequence[Path]) -> None:
        """Tell the tools what came of the run."""
        if self._tools:
            found = summary()
            for tool in self._tools:
                tool.finish(found, files)

    def where(self) -> dict[str, str]:
        """Where the tools have the run."""
        return {tool.title: tool.where for tool in self._tools}

    def lost(self) -> list[str]:
        """What the tools did not get, once they are closed."""
        return [line for tool in self._tools for line in tool.lost()]

    def close(self, *, failed: bool = False) -> None:
        """`failed`: an error ended the run."""
        for sink in self._sinks[: len(self._sinks) - len(self._tools)]:
            sink.close()
        for tool in self._tools:
            tool.close(failed=failed)


def ratio_summary(prefix: str, log_ratios: NDArray[np.floating]) -> dict[str, float]:
    """Spread of w = exp(log ratio) as `<prefix>/<stat>`, for every stat of `RATIO_STATS`; nothing for no tokens.

    `log_ratios` has shape [tokens]. The effective sample size is a share of n: 1 where all w are equal, 1/n where one
    outweighs all others. It does not overflow, whatever the ratios; the others may reach infinity.
    """
    if log_ratios.size == 0:
        return {}
    exponents = log_ratios.astype(np.float64).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.exp(exponents)
        # The share does not change when all w are divided by the largest, and then nothing overflows.
        scaled = np.exp(exponents - exponents.max())
        share = scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum())
        p01, p50, p99 = np.quantile(ratios, [0.01, 0.5, 0.99])
        k1, k3 = -exponents.mean(), (ratios - 1 - exponents).mean()
    extremes = {"min": ratios.min(), "p01": p01, "p50": p50, "p99": p99, "max": ratios.max()}
    stats = {**extremes, "ess": share, "k1": k1, "k3": k3}
    return {f"{prefix}/{stat}": float(value) for stat, value in stats.items()}


def mean_shaped(log_ratios: NDArray[np.floating], beta: float) -> float:
    """Mean over tokens of f(w) = w / (w + beta), for w = exp(log ratio); it does not overflow."""
    with np.errstate(over="ignore"):
        return float((1 / (1 + beta * np.exp(-log_ratios.astype(np.float64)))).mean())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One dict a step, by step, with its "step"; several lines of a step are joined, the later value standing.

    A value written as null is NaN. A half-written last line (the run is writing) is left out. Raises DataError with the
    line for any other line that is no JSON object with a step.
    """
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(_whole_lines(path), 1):
        record = _parse(path, number, line)
        values = {name: math.nan if value is None else value for name, value in record.items()}
        steps.setdefault(record["step"], {}).update(values)
    return [steps[step] for step in sorted(steps)]


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


def _checked(name: str, value: float | np.number) -> float:
    assert find_metric(name) is not None, f"unknown metric {name!r}: add it to METRICS"
    assert isinstance(value, Real), f"metric {name} must be a real number, found {type(value).__name__}"
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _whole_lines(path: Path) -> list[str]:
    """The lines of the file with their newline; one without it was cut off and is left out."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    return [line + "\n" for line in text.split("\n")[:-1]]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: not JSON ({error.msg}); remove the line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise DataError(f"{path}, line {number}: not an object with a whole-number step; remove the line")
    return record
