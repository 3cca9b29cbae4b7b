"""The settings of a sweep (its arms), from what the command line says, and their runs, one a seed."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exgrpo_megatron.config import Config
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.recipe import load_recipe

OWN_KEYS = ("logger.log_dir",)
"""Keys that a sweep sets for each run, beside those it sets to the seed."""

MOST_SEEDS = 10_000
"""In one range."""
_LONGEST_NAME = 200
"""Characters of an arm's folder."""


@dataclass(frozen=True)
class Arm:
    """One setting: a recipe and what is changed in it."""

    name: str
    recipe: Path
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Its name as that of a folder."""
        return re.sub(r"[^\w.=+-]+", "_", self.name)


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path
    """Its `logger.log_dir`."""
    overrides: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """What the process of the run said, all attempts one after the other."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Axis:
    """A key and the values it takes in turn, as they stand in a recipe."""

    key: str
    values: tuple[str, ...]


def parse_seeds(text: str) -> list[int]:
    """`1,2,5-8` as numbers, in that order.

    Raises:
        ConfigError: it is no such list, or a seed stands in it twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"--seeds {text!r}: {part!r} is neither a seed nor a range of them; write 1,2,3 or 1-6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MOST_SEEDS:
            raise ConfigError(f"--seeds {text!r}: {part!r} are more than {MOST_SEEDS} seeds")
        seeds += range(first, last + 1)
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice or not seeds:
        raise ConfigError(f"--seeds {text!r}: {f'{twice[0]} stands there twice' if twice else 'a range without seeds'}")
    return seeds


def parse_axis(text: str) -> Axis:
    """`section.key=a,b,c`; a comma within brackets or quotes does not part values.

    Raises:
        ConfigError: it is none, or a value stands in it twice.
    """
    key, separator, values = text.partition("=")
    parts = tuple(part.strip() for part in re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""", values))
    if not separator or not key or not parts or len(set(parts)) < len(parts):
        raise ConfigError(f"--vary {text!r}: write it as section.key=value,value,... with different values")
    return Axis(key, parts)


def make_arms(
    recipes: Sequence[str], named: Sequence[str], varied: Sequence[Axis], common: Sequence[str] = ()
) -> list[Arm]:
    """Every recipe with every named set of overrides and every combination of varied values.

    `recipes`: `FILE` or `NAME=FILE`; `named`: `NAME: section.key=value ...`; `common`: overrides of all arms. A name
    says what tells an arm from the others.

    Raises:
        ConfigError: two arms of one name, or one key set in two of these places.
    """
    bases = [_recipe_arm(text) for text in recipes]
    sets = [_named_overrides(text) for text in named] or [("", ())]
    combinations = list(itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in varied)))
    arms = []
    for base, (name, overrides), combination in itertools.product(bases, sets, combinations):
        told = list(filter(None, [name, *(_short(text, varied) for text in combination)]))
        words = [base.name, *told] if len(bases) > 1 or not told else told
        chosen = (*common, *overrides, *combination)
        _check_once(chosen)
        arms.append(Arm(" ".join(words), base.recipe, chosen))
    _check_apart(arms)
    return arms


def make_runs(arms: Sequence[Arm], seeds: Sequence[int], seed_keys: Sequence[str], out: Path) -> list[Run]:
    """The runs in their order: all arms of the first seed, then of the next, so that what is done early compares.

    Raises:
        ConfigError: an arm's recipe is refused, or its runs would write into one folder.
    """
    return [_run(arm, seed, seed_keys, out) for seed in seeds for arm in arms]


def key_of(override: str) -> str:
    """The key that `section.key=value` sets."""
    return override.partition("=")[0]


def _recipe_arm(text: str) -> Arm:
    name, separator, path = text.partition("=")
    if not separator or Path(text).exists():
        return Arm(Path(text).stem, Path(text))
    if not name or not path:
        raise ConfigError(f"recipe {text!r}: write it as FILE or as NAME=FILE")
    return Arm(name, Path(path))


def _named_overrides(text: str) -> tuple[str, tuple[str, ...]]:
    name, separator, rest = text.partition(":")
    try:
        overrides = tuple(shlex.split(rest))
    except ValueError as error:
        raise ConfigError(f"--arm {text!r}: {error}") from None
    if not separator or not name.strip() or not all("=" in override for override in overrides):
        raise ConfigError(f"--arm {text!r}: write it as 'NAME: section.key=value section.key=value'")
    return name.strip(), overrides


def _short(override: str, varied: Sequence[Axis]) -> str:
    """`lr=1e-4` where the last part of the key tells it from the other varied keys."""
    key, _, value = override.partition("=")
    leaf = key.rpartition(".")[2]
    alone = sum(axis.key.rpartition(".")[2] == leaf for axis in varied) == 1
    return f"{leaf if alone else key}={value}"


def _check_once(overrides: Iterable[str]) -> None:
    for key, count in Counter(map(key_of, overrides)).items():
        if count > 1:
            raise ConfigError(f"{key} is set twice for one arm, by --set, --arm or --vary: once is enough")


def _check_apart(arms: Sequence[Arm]) -> None:
    for folder, count in Counter(arm.folder for arm in arms).items():
        # `..` would be a folder beside that of the sweep.
        if not folder.strip(".") or len(folder.encode()) > _LONGEST_NAME:
            raise ConfigError(
                f"an arm called {folder[:60]!r}: no name for a folder; give it one, as NAME=FILE or --arm 'NAME: ...'"
            )
        if count > 1:
            raise ConfigError(
                f"{count} arms would be called {folder}: give them different names, as NAME=FILE or --arm 'NAME: ...'"
            )


def _run(arm: Arm, seed: int, seed_keys: Sequence[str], out: Path) -> Run:
    folder = out / arm.folder / f"seed-{seed}"
    for key in map(key_of, arm.overrides):
        if key in (*seed_keys, *OWN_KEYS):
            raise ConfigError(f"arm {arm.name!r}: {key} is set by the sweep itself, to another value for each run")
    overrides = (*arm.overrides, *(f"{key}={seed}" for key in seed_keys), f"logger.log_dir={folder}")
    try:
        config = load_recipe(arm.recipe, overrides)
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name!r}: {error}") from None
    for key, shared in (
        ("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir),
        ("experience.store_dir", config.experience.store_dir),
    ):
        if shared is not None:
            raise ConfigError(
                f"arm {arm.name!r}: {key} = {shared!r} would be one folder for all runs: --set {key}=null"
            )
    return Run(arm, seed, folder, overrides, config)
