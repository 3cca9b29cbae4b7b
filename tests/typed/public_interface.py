"""Somebody's script that uses every public name. `make check` types it as `mypy --strict` does; nobody runs it."""

from pathlib import Path

from torch import Tensor

import exgrpo_conversion
import exgrpo_kernels
from exgrpo_conversion import compare_checkpoints, convert_checkpoint, open_source
from exgrpo_kernels import logits_loss, logprob_entropy, logprobs, score, token_loss, token_terms
from exgrpo_megatron import (
    CheckpointError,
    Config,
    ConfigError,
    DataError,
    LostRankError,
    TrainingResult,
    UserError,
    __version__,
    load_recipe,
    train,
)
from exgrpo_megatron.replay import (
    AddReport,
    DifficultyBucketer,
    ReplayedTrajectory,
    SelectiveReplay,
    TrajectoryBuffer,
    compute_importance_weights,
)


def trained(folder: Path) -> float:
    config: Config = load_recipe(folder / "recipe.yaml", {"grpo.seed": 3, "env.reward_function": reward})
    again: Config = load_recipe({"defaults": "recipe.yaml"}, ["grpo.seed=3"])
    seed: int = again.grpo.seed
    try:
        result: TrainingResult = train(config)
    except (ConfigError, DataError, CheckpointError) as error:
        raise SystemExit(f"{__version__}, seed {seed}: {error}") from error
    except LostRankError as error:
        ranks: tuple[int, ...] = error.killed
        raise SystemExit(str(ranks)) from error
    except UserError:
        return 0.0
    export: Path | None = result.export
    return result.metrics["reward/mean"] if export else 0.0


def reward(*, question: str, response: str, answer: str) -> float:
    return float(len(response) < len(question) and answer in response)


def replayed(prompt: list[int], tokens: list[int], recorded: list[float], now: Tensor, then: Tensor) -> Tensor:
    buffer = TrajectoryBuffer(max_size=10, bucketer=DifficultyBucketer(window_size=4))
    row = {"question_id": "q", "prompt_ids": prompt, "token_ids": tokens, "logprobs": recorded, "reward": 1.0}
    report: AddReport = buffer.add([row])
    chosen: list[ReplayedTrajectory] = SelectiveReplay(replay_probability=0.3).select(buffer, report.stored)
    rate: float = chosen[0].correctness_rate
    return compute_importance_weights(now, then, shaping="ratio") * (1 - rate)


def losses(
    hidden: Tensor, logits: Tensor, head: exgrpo_kernels.OutputHead, inputs: exgrpo_kernels.LossInputs
) -> list[Tensor]:
    objective = exgrpo_kernels.Objective(shaping=shaping())
    form: exgrpo_kernels.Form = "linear"
    columns: exgrpo_kernels.Columns = head.columns
    loss: exgrpo_kernels.FusedLoss = token_loss(hidden, head, inputs, objective, form=form)
    new, entropies = logprobs(hidden, head, inputs.targets)
    scored, _ = score(hidden, head, inputs.targets)
    of_logits, _ = logprob_entropy(logits, inputs.targets)
    terms: exgrpo_kernels.TokenTerms = token_terms(
        new, inputs.old_logprobs, inputs.advantages, inputs.replayed, objective
    )
    return [
        loss.loss,
        logits_loss(logits, columns, inputs, objective).loss,
        *(entropies, scored, of_logits, terms.policy_loss),
    ]


def shaping() -> exgrpo_kernels.Shaping:
    return "normalized_ratio"


def converted(source: Path, folder: Path) -> bool:
    try:
        first: exgrpo_conversion.Source = open_source(source)
    except (exgrpo_conversion.ModelFolderError, exgrpo_conversion.UnsupportedModelError):
        return False
    model: exgrpo_conversion.Architecture = first.arch
    infos: dict[str, exgrpo_conversion.TensorInfo] = first.infos()
    summary: exgrpo_conversion.Summary = convert_checkpoint(first, exgrpo_conversion.Target("hf", folder))
    found: exgrpo_conversion.Comparison = compare_checkpoints(first, open_source(folder))
    tensors: tuple[exgrpo_conversion.TensorFinding, ...] = found.tensors
    return found.same and len(tensors) == len(infos) == summary.tensors and model.num_layers > 0


def family(name: str) -> exgrpo_conversion.Family:
    return exgrpo_conversion.Family(model_type=name, layer={})
