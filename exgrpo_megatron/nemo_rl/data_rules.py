"""Rules of NeMo-RL's section `data`: files are taken, data sets of a hub are refused, prompt files become templates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo_rl.verdicts import NEUTRAL, Given, Leaf, Leave, Refuse, Take, Verdict

_OWN_FILE = (None, "ResponseDataset")
"""Values of dataset_name that mean a file of the user's (data_path)."""
SOURCES = ("path", "generator", "source_function")
"""Ours, of data.train or data.validation, that say where questions come from."""


def dataset_name(leaf: Leaf) -> Verdict:
    """Of data.train or data.validation."""
    section = leaf.key.rpartition(".")[0]
    replaced = _replaced(section, leaf.given)
    if replaced:
        return Leave(f"{replaced} is given instead")
    if leaf.value in _OWN_FILE:
        return Leave("the questions are those of data_path")
    return Refuse(
        f"{leaf.value!r} is fetched from a hub; questions here are files",
        f"{section}.path=FILE (JSONL or Parquet; {section}.question_key and .answer_key name its columns)",
    )


def data_path(leaf: Leaf) -> Verdict:
    section = leaf.key.rpartition(".")[0]
    replaced = _replaced(section, leaf.given)
    if replaced or leaf.value is None:
        return Leave(f"{replaced} is given instead" if replaced else NEUTRAL)
    columns = {}
    for ours, theirs, default in (("question_key", "input_key", "input"), ("answer_key", "output_key", "output")):
        columns[f"{section}.{ours}"] = leaf.given.get(
            f"{section}.{theirs}", leaf.given.get(f"data.default.{theirs}", default)
        )
    return Take(
        {f"{section}.path": leaf.value, **columns}, f"is {section}.path, with the columns of input_key, output_key"
    )


def older_dataset_name(leaf: Leaf) -> Verdict:
    """`data.dataset_name`, which brings training and held-out questions, the latter unless data.val_dataset_name or
    data.val_data_path says otherwise."""
    if leaf.value in _OWN_FILE:
        return Leave("the questions are those of data.train_data_path")
    held_out = "data.validation" in leaf.given or any(
        leaf.given.get(f"data.{name}") is not None for name in ("val_dataset_name", "val_data_path")
    )
    missing = [
        f"{section}.path=FILE"
        for section, said in (("data.train", False), ("data.validation", held_out))
        if not (said or _replaced(section, leaf.given))
    ]
    if not missing:
        return Leave("the questions are those of data.train and data.validation")
    return Refuse(
        f"{leaf.value!r} is fetched from a hub; questions here are files",
        f"{' '.join(missing)} (JSONL or Parquet; question_key and answer_key beside path name the columns; "
        "data.validation=null for none)",
    )


def older_val_dataset_name(leaf: Leaf) -> Verdict:
    if leaf.value in _OWN_FILE or _replaced("data.validation", leaf.given):
        return Leave("the questions are those of data.validation")
    return Refuse(
        f"{leaf.value!r} is fetched from a hub; questions here are files",
        f"data.validation.path=FILE, or {leaf.key}=null",
    )


def older_data_path(section: str) -> Callable[[Leaf], Verdict]:
    """Of `data.train_data_path` and `data.val_data_path`, which share their columns."""

    def judge(leaf: Leaf) -> Verdict:
        replaced = _replaced(section, leaf.given)
        if replaced or leaf.value is None:
            return Leave(f"{replaced} is given instead" if replaced else NEUTRAL)
        columns = {
            f"{section}.question_key": leaf.given.get("data.input_key", "input"),
            f"{section}.answer_key": leaf.given.get("data.output_key", "output"),
        }
        return Take(
            {f"{section}.path": leaf.value, **columns}, f"is {section}.path, with the columns of input_key, output_key"
        )

    return judge


def split_validation_size(leaf: Leaf) -> Verdict:
    if not leaf.value:
        return Leave(NEUTRAL)
    held_out = _replaced("data.validation", leaf.given)
    if held_out:
        return Leave(f"{held_out} is given instead")
    return Refuse(
        "no questions are split off; held-out questions are a file of their own",
        f"data.validation.path=FILE, or {leaf.key}=0",
    )


def datasets(leaf: Leaf) -> Verdict:
    """The whole of data.train or data.validation where it is no section."""
    if leaf.value is None:
        return Leave(NEUTRAL)
    return Refuse("questions come from one file", f"{leaf.key}.path=FILE")


def shuffle(leaf: Leaf) -> Verdict:
    if leaf.value is True:
        return Take({"data.epoch_order": "reshuffle"}, "is data.epoch_order")
    return Refuse("questions are always shuffled", f"{leaf.key}=true")


def prompt_file(leaf: Leaf) -> Verdict:
    return _template(leaf, "data.prompt_template")


def system_prompt_file(leaf: Leaf) -> Verdict:
    return _template(leaf, "data.system_prompt")


def _template(leaf: Leaf, ours: str) -> Verdict:
    name = leaf.key.rpartition(".")[2]
    if ours in leaf.given:
        return Leave(f"{ours} is given instead")
    if leaf.key.startswith("data.default.") and f"data.train.{name}" in leaf.given:
        return Leave(f"data.train.{name} is what counts")
    if leaf.key == f"data.{name}" and (newer := {f"data.train.{name}", f"data.default.{name}"} & set(leaf.given)):
        return Leave(f"{max(newer)} is what counts")
    if leaf.key.startswith("data.validation."):
        return Leave("held-out questions have the prompts of the others")
    if leaf.value is None:
        return Leave(NEUTRAL)
    try:
        text = _find(str(leaf.value), leaf.given).read_text(encoding="utf-8")
        if ours == "data.prompt_template":
            # Theirs is a format string with one place.
            text = text.format("{question}")
    except (OSError, ValueError, LookupError) as error:
        return Refuse(f"{str(leaf.value)!r} cannot be used: {error}", f"{ours}=TEXT, or {leaf.key}=FILE")
    return Take({ours: text}, f"its text is {ours}")


def _find(name: str, given: Given) -> Path:
    """From the current folder, else from a folder above the recipe (theirs is the top of NeMo-RL's own tree)."""
    recipe = Path(given["<recipe>"]).resolve()
    for folder in (Path(), *recipe.parents):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"no such file here or in a folder above {recipe.name}")


def _replaced(section: str, given: Given) -> str:
    """The key of ours that says where the questions come from, if one is given."""
    named = [f"{section}.{name}" for name in SOURCES if given.get(f"{section}.{name}") is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)}: give one of them")
    return named[0] if named else ""
