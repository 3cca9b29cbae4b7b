"""From a configuration of NeMo-RL to a recipe, with a report of what became of every key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.nemo_rl.interpolation import resolve
from exgrpo_megatron.nemo_rl.keys import FIXED, holds_rows, row_of
from exgrpo_megatron.nemo_rl.verdicts import Leaf, Leave, Refuse, Take, Verdict, shown

_MARKS = (("policy", "megatron_cfg", "enabled"), ("loss_fn", "reference_policy_kl_penalty"))


def is_nemo_rl(raw: dict[str, Any]) -> bool:
    """Whether a file, its `defaults:` included, is NeMo-RL's: it has both `policy.megatron_cfg.enabled` and
    `loss_fn.reference_policy_kl_penalty`, which NeMo-RL's GRPO cannot do without and recipes never have."""
    return all(_has(raw, mark) for mark in _MARKS)


@dataclass
class Translation:
    """A recipe made of a file of NeMo-RL."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Nested, to be checked as any recipe."""
    same: list[str] = field(default_factory=list)
    """Keys taken as they are, those of recipes alone included."""
    changed: list[str] = field(default_factory=list)
    """`theirs = value -> ours = value (why)`."""
    added: list[str] = field(default_factory=list)
    """`ours = value: why`, where NeMo-RL has no key."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """Keys without meaning here, by reason."""

    def report(self, source: str) -> str:
        """What was taken and what was not, to print once and to keep beside the recipe."""
        lines = [f"{source} is a configuration of NeMo-RL: {len(self.same)} keys are taken as they are"]
        for title, items in (
            ("taken under another name, or in another unit:", self.changed),
            ("set where NeMo-RL has no key, to what gives its result:", self.added),
            ("left out:", [f"{reason}: {', '.join(keys)}" for reason, keys in self.left.items()]),
        ):
            if items:
                lines += [title, *(_wrapped(item) for item in items)]
        return "\n".join(lines)


def translate(raw: dict[str, Any], source: str) -> Translation:
    """The recipe that `raw`, merged from the file `source` and its overrides, stands for.

    Raises:
        ConfigError: an interpolation that cannot be resolved, or keys that would change the result and have no
            counterpart; the message names all of these, with the overrides to give.
    """
    try:
        given = dict(_leaves(resolve(raw)))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    given["<recipe>"] = source
    done = Translation()
    verdicts = _judge(given, done, source)
    refused = [(key, verdict) for key, verdict in verdicts.items() if isinstance(verdict, Refuse)]
    if refused:
        raise ConfigError(_refusal(source, given, refused))
    own = set(done.same)
    for key, verdict in verdicts.items():
        if isinstance(verdict, Leave):
            done.left.setdefault(verdict.reason, []).append(key)
        elif isinstance(verdict, Take):
            _take(key, given[key], verdict, done, own)
    for key, (value, reason) in FIXED.items():
        if not _has(done.recipe, tuple(key.split("."))):
            _put(done.recipe, key, value)
            done.added.append(f"{key} = {shown(value)}: {reason}")
    return done


def _judge(given: dict[str, Any], done: Translation, source: str) -> dict[str, Verdict]:
    """The verdict on every key of NeMo-RL's; others are put into the recipe, whose checks know them or refuse them."""
    verdicts: dict[str, Verdict] = {}
    for key, value in given.items():
        row = row_of(key)
        if row is not None:
            try:
                verdicts[key] = row.judge(Leaf(key, value, given))
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        elif key == "<recipe>":
            continue
        elif value in (None, {}) and holds_rows(key):
            verdicts[key] = Leave("nothing stands in it")
        else:
            _put(done.recipe, key, value)
            done.same.append(key)
    return verdicts


def _take(key: str, value: Any, verdict: Take, done: Translation, own: set[str]) -> None:
    replaced = sorted(own & set(verdict.ours))
    if replaced:
        done.left.setdefault(f"{replaced[0]} is given instead", []).append(key)
    for name, ours in verdict.ours.items():
        if name not in own:
            _put(done.recipe, name, ours)
    if replaced:
        return
    if verdict.ours == {key: value}:
        done.same.append(key)
        return
    into = ", ".join(f"{name} = {_short(ours)}" for name, ours in verdict.ours.items())
    done.changed.append(f"{key} = {_short(value)} -> {into}{f' ({verdict.note})' if verdict.note else ''}")


def _refusal(source: str, given: dict[str, Any], refused: list[tuple[str, Refuse]]) -> str:
    lines = [f"{source} is a configuration of NeMo-RL; these keys would change the result, and are not supported:"]
    alike: dict[Refuse, list[str]] = {}
    for key, verdict in refused:
        alike.setdefault(verdict, []).append(f"{key} = {_short(given[key])}")
    for verdict, keys in alike.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        lines += [f"  {', '.join(keys[:3])}{more}: {verdict.reason}", f"    give {verdict.instead}"]
    return "\n".join(lines)


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by dotted key; empty sections and lists are values."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _put(recipe: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    here = recipe
    for section in sections:
        here = here.setdefault(section, {})
    if isinstance(here.get(last), dict):
        raise ConfigError(
            f"{key} = {_short(here[last])}: a section, where a value belongs (a text in braces needs quotes)"
        )
    here[last] = value


def _has(raw: Any, path: tuple[str, ...]) -> bool:
    for part in path:
        if not isinstance(raw, dict) or part not in raw:
            return False
        raw = raw[part]
    return True


def _short(value: Any) -> str:
    text = shown(value).replace("\n", "\\n")
    return text if len(text) <= 100 else f"{text[:100]}..."


def _wrapped(item: str) -> str:
    return textwrap.fill(item, 118, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
