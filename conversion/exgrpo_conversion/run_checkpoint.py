"""Checkpoints of this program's runs: `step_N/policy` is a distributed checkpoint of Megatron, the recipe names the
model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from exgrpo_conversion._common_file import read_common
from exgrpo_conversion.claims import Claims
from exgrpo_conversion.config_file import CONFIG_FILE, read_json
from exgrpo_conversion.errors import ModelFolderError
from exgrpo_conversion.torch_dist import COMMON_FILE

STATE_FILE = "state.json"
_STEP = re.compile(r"step_(\d{6,})")
_UNFINISHED = re.compile(r"step_\d{6,}\.incomplete(_old)?")


def is_unfinished(step: Path) -> bool:
    """Whether a folder of a run is what a save wrote that was stopped."""
    return _UNFINISHED.fullmatch(step.name) is not None and not (step / CONFIG_FILE).exists()


def newest_step(path: Path) -> Path | None:
    """The newest whole checkpoint in a run's folder, or in its folder of checkpoints."""
    for folder in (path / "checkpoints", path):
        if folder.is_dir():
            steps = [step for step in folder.iterdir() if _STEP.fullmatch(step.name) and (step / STATE_FILE).is_file()]
            if steps:
                return max(steps, key=lambda step: int(step.name.removeprefix("step_")))
    return None


def run_model(step: Path) -> list[Path]:
    """Where the model's folder may be: as the recipe in the checkpoint says, seen from here, or in the run's folder,
    where an embedded model is."""
    recipe = read_json(step / STATE_FILE).get("recipe")
    policy = recipe.get("policy") if isinstance(recipe, dict) else None
    name = policy.get("model_name") if isinstance(policy, dict) else None
    named = [Path(name)] if isinstance(name, str) else []
    return [*named, step.parent.parent / "model"]


def run_claims(policy: Path) -> Claims:
    """The architecture that a checkpoint was saved with, in Megatron's words.

    Raises:
        ModelFolderError: it does not say.
    """
    path = policy / COMMON_FILE
    about = read_common(path).get("about")
    found: Any = about.get("architecture") if isinstance(about, dict) else None
    if not isinstance(found, dict):
        raise ModelFolderError(f"{path} has no architecture: it is no checkpoint of a run, or of another version")
    values = {claimed: found.get(name) for name, claimed in _NAMES.items()}
    scaling = found.get("rope_scaling")
    values["rope_scaling"] = scaling is not None
    values["rope_scaling_factor"] = scaling.get("factor") if isinstance(scaling, dict) else None
    return Claims(str(path), values)


_NAMES = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn_size": "ffn_hidden_size",
    "tied": "share_embeddings_and_output_weights",
    "qkv_bias": "add_qkv_bias",
    "qk_norm": "qk_layernorm",
    "norm_eps": "layernorm_epsilon",
    "rope_theta": "rotary_base",
}
"""Field of an Architecture -> Megatron's name of it."""
